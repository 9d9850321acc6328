"""The checks of `tsx deploy` before it creates anything: archive, limits and benchmark."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarked import results
from tests.support.deploying import HANDLER, Deploy, a_spec
from tests.support.models import make_model
from tests.support.platforms.aws import Scenario
from tsx_archiver import rewrite_archive
from tsx_cli.bench.report.archive_record import record_of
from tsx_cli.deploy.preflight.limits import ModelProfile, find_problems
from tsx_cli.deploy.preflight.outlook import Outlook
from tsx_cli.deploy.targets import find_target


@pytest.fixture
def deploy(deploy_to: Callable[..., Deploy], tmp_path: Path) -> Deploy:
    """Return the command for an archive that the test may change."""
    deploy = deploy_to("sagemaker")
    deploy.archive = make_model(tmp_path / "m.mar", HANDLER)
    return deploy


def add_benchmark(archive: Path, **changes: Any) -> None:
    """Add a benchmark record to an archive, as `tsx bench --write` does."""
    record = record_of(results())
    # The winner has the same number of threads.
    record.curves[0].threads = 1
    for path, value in changes.items():
        part: Any = record
        *parents, last = path.split("__")
        for name in parents:
            part = getattr(part, name)
        setattr(part, last, value)
    rewrite_archive(archive, {"tsx-bench.json": record.content()})


def test_the_archive_is_loaded_before_creating_resources(
    deploy: Deploy, scenario: Scenario, tmp_path: Path
) -> None:
    loadable = deploy.archive
    deploy.archive = make_model(tmp_path / "broken.mar", "import nothing_like_this\n")
    deploy(*deploy.wish("--yes"), code=1)
    assert "does not load" in deploy.err
    assert "--no-check deploys it anyway" in deploy.err
    assert scenario.calls == []
    deploy.apply()
    assert "was not loaded here (--no-check)" in deploy.err
    deploy.archive = loadable
    deploy(*deploy.wish("--yes"))
    assert "check: m 1.0 loaded in " in deploy.err


def test_a_damaged_archive_is_not_deployed(deploy: Deploy) -> None:
    add_benchmark(deploy.archive)
    with zipfile.ZipFile(deploy.archive) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["handler.py"] += b"# changed\n"
    manifest = json.loads(members["MAR-INF/MANIFEST.json"])
    manifest.setdefault("tsx", {}).setdefault("sha256", {})["handler.py"] = "0" * 64
    members["MAR-INF/MANIFEST.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(deploy.archive, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    deploy("plan", *deploy.wish("--no-check"), code=1)
    assert "is damaged or incomplete: " in deploy.err


def test_a_breach_of_the_targets_limits_is_reported_before_aws_is_called(deploy: Deploy) -> None:
    add_benchmark(deploy.archive, best__p99_ms=61_000.0, inputs__largest=7 << 20)
    deploy("plan", *deploy.wish(), code=1)
    assert "has 7 MiB, and SageMaker takes" in deploy.err
    assert "SageMaker ends one after 60 s" in deploy.err
    assert "--no-check deploys it anyway" in deploy.err
    breaches = deploy.plan("--no-check", code=2)["findings"]
    assert [finding["level"] for finding in breaches] == ["error", "error"]
    assert breaches[0]["source"].startswith("https://")


def test_the_plan_shows_the_figures_of_the_benchmark(deploy: Deploy) -> None:
    out = deploy("plan", *deploy.wish(), code=2)
    assert f"`tsx bench {deploy.archive} --write`" in out
    add_benchmark(deploy.archive)
    out = deploy("plan", *deploy.wish("--set=sagemaker.instances=3"), code=2)
    best = record_of(results()).best
    assert f"{best.throughput:,.4g} requests/s, p99 {best.p99_ms:.3g} ms under p99<100ms" in out
    assert f"3 instances like that machine: {3 * best.throughput:,.4g} requests/s" in out
    assert "batches take (size: ms) 1: 15.5, 2: " in out
    assert "to scale, autoscaling.target = " in out
    measured = deploy.plan(code=2)["measured"]
    assert (measured["rps"], measured["configuration"]["batch_size"]) == (best.throughput, 4)


def test_a_scaling_target_above_the_capacity_is_reported() -> None:
    record = record_of(results())

    def view(target: str = "sagemaker", **sagemaker: Any) -> Outlook:
        scaling = find_target(target).scaling(a_spec(target, sagemaker=sagemaker))
        return Outlook(record, "digits.mar", scaling)

    late = view(autoscaling={"min": 1, "max": 3, "target": 500})
    assert late.lines()[-1].endswith(f"before a replica starts: {late.fitting_target} fits")
    line = view(autoscaling={"min": 1, "max": 3, "target": 1}).lines()[-1]
    rate = record.best.throughput
    assert f"1 instance like that machine: {rate:,.4g} requests/s, 3 {3 * rate:,.4g}" in line
    assert view(serverless={}).as_json()["rps_of_all"] is None
    function = view("lambda").lines()[-1].strip()
    assert function.startswith("an environment answers one request at a time: ")
    component = view(component={"endpoint": "e", "copies": 2})
    assert "2 instances like that machine" in component.lines()[-2]
    # tsx deploy configures no scaling for multi-model endpoints.
    assert "autoscaling" not in view(multi_model={"endpoint": "e"}).lines()[-1]
    assert "2 instances like that machine" in view("kubernetes").lines()[-1]


def test_the_limits_of_a_function_follow_its_specification() -> None:
    settings = {
        "memory": 1024,
        "timeout": "20s",
        "managed_instances": {"provider": "arn:aws:lambda:x", "gpu_memory": 6},
    }
    profile = find_target("lambda").profile(a_spec("lambda", **{"lambda": settings}))
    limits = [profile.limits[name].most for name in ("memory", "time", "request")]
    assert limits == [1 << 30, 20, 6 << 20]
    assert profile.device == "cuda"
    finding = find_problems(profile, ModelProfile(packed=1, unpacked=1, p99_ms=25_000.0))[0]
    assert "Lambda ends one after 20 s. Raise lambda.timeout" in finding.text


@pytest.mark.parametrize(
    ("component", "memory", "device"),
    [
        ({"memory": 1024}, 1 << 30, "cpu"),
        # The limit does not apply, since the weights are in the GPU's memory.
        ({"memory": 1024, "gpus": 1}, None, "cuda"),
    ],
)
def test_the_memory_of_a_component_is_its_requested_part(
    component: dict[str, Any], memory: int | None, device: str
) -> None:
    settings = {"component": {"endpoint": "shared", **component}, "instance_type": "ml.g5.xlarge"}
    profile = find_target("sagemaker").profile(a_spec("sagemaker", sagemaker=settings))
    assert getattr(profile.limits.get("memory"), "most", None) == memory
    assert profile.device == device
    assert profile.limits["request"].most == 6 << 20
    breaches = find_problems(profile, ModelProfile(packed=1, unpacked=2 << 30))
    remedies = ["raise sagemaker.component.memory"] if memory else []
    assert [finding.text.rpartition(": ")[2] for finding in breaches] == remedies


@pytest.mark.parametrize(
    ("target", "size", "memory"),
    [
        ("container", "512m", 512 << 20),
        ("container", "4g", 4 << 30),
        ("kubernetes", "2Gi", 2 << 30),
    ],
)
def test_the_memory_of_a_container_is_its_limit(target: str, size: str, memory: int) -> None:
    settings = {"memory": size, "gpus": 1, "startup_timeout": "2m"}
    profile = find_target(target).profile(a_spec(target, **{target: settings}))
    limit = profile.limits["memory"]
    assert (limit.most, limit.key) == (memory, f"{target}.memory")
    assert (profile.limits["start"].most, profile.device) == (120, "cuda")
