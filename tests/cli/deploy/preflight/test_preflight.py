"""What `tsx deploy` looks at before it creates anything: the archive whole, within limits, loaded;
and what its benchmark promises.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarked import results
from tests.support.deploying import HANDLER, a_spec
from tests.support.models import make_model
from tests.support.platforms.aws import Course
from tsx_archiver import rewrite_archive
from tsx_cli.bench.report.archive_record import record_of
from tsx_cli.deploy.preflight.limits import ModelProfile, findings
from tsx_cli.deploy.preflight.outlook import Outlook, outlook
from tsx_cli.deploy.preflight.preflight import place_of
from tsx_cli.main import main

SAID = ["--target", "sagemaker", "--name", "m", "--role", "arn:aws:iam::123456789012:role/r"]
SAID += ["--image", "123456789012.dkr.ecr.eu-central-1.amazonaws.com/tsx@sha256:" + "0" * 64]


def measured(archive: Path, **changes: Any) -> Path:
    """With a benchmark, as `tsx bench --write` leaves one."""
    kept = record_of(results())
    kept.curves[0].threads = 1  # as many as the winner has
    for place, value in changes.items():
        part: Any = kept
        *path, last = place.split("__")
        for name in path:
            part = getattr(part, name)
        setattr(part, last, value)
    rewrite_archive(archive, {"tsx-bench.json": kept.content()})
    return archive


@pytest.mark.usefixtures("processes")
def test_the_archive_is_loaded_before_anything_is_created(
    course: Course, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = make_model(tmp_path / "broken.mar", "import nothing_like_this\n")
    assert main(["deploy", str(broken), *SAID, "--yes"]) == 1
    said = capsys.readouterr().err
    assert "does not load" in said
    assert (
        "--no-check deploys it anyway"
        in said
    )
    assert course.calls == []
    assert main(["deploy", str(broken), *SAID, "--yes", "--no-check"]) == 0
    assert "was not loaded here (--no-check)" in capsys.readouterr().err
    assert main(["deploy", str(make_model(tmp_path / "m.mar", HANDLER)), *SAID, "--yes"]) == 0
    assert "check: m 1.0 loaded in " in capsys.readouterr().err


def test_a_damaged_archive_is_not_deployed(
    course: Course, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = measured(make_model(tmp_path / "m.mar", HANDLER))
    with zipfile.ZipFile(archive) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    members["handler.py"] += b"# changed\n"
    members["MAR-INF/MANIFEST.json"] = with_checksum(members["MAR-INF/MANIFEST.json"])
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    assert main(["deploy", "plan", str(archive), *SAID, "--no-check"]) == 1
    assert "is damaged or incomplete: " in capsys.readouterr().err


def with_checksum(manifest: bytes) -> bytes:
    """One that is not that of the file."""
    reported = json.loads(manifest)
    reported.setdefault("tsx", {}).setdefault("sha256", {})["handler.py"] = "0" * 64
    return json.dumps(reported).encode()


def test_what_the_target_does_not_take_stops_before_anything_is_asked(
    course: Course, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = measured(
        make_model(tmp_path / "m.mar", HANDLER), best__p99_ms=61_000.0, inputs__largest=7 << 20
    )
    assert main(["deploy", "plan", str(archive), *SAID]) == 1
    said = capsys.readouterr().err
    assert (
        "has 7 MiB, and SageMaker takes"
        in said
    )
    assert "SageMaker ends one after 60 s" in said
    assert "--no-check deploys it anyway" in said
    assert main(["deploy", "plan", str(archive), *SAID, "--no-check", "--json"]) == 2
    reported = json.loads(capsys.readouterr().out)
    assert [each["level"] for each in reported["findings"]] == ["error", "error"]
    assert reported["findings"][0]["source"].startswith("https://")


def test_the_plan_shows_what_its_benchmark_promises(
    course: Course, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = make_model(tmp_path / "m.mar", HANDLER)
    assert main(["deploy", "plan", str(archive), *SAID]) == 2
    assert (
        f"measured: never; `tsx bench {archive} --write` finds its best batch size"
        in capsys.readouterr().out
    )
    measured(archive)
    assert main(["deploy", "plan", str(archive), *SAID, "--set=sagemaker.instances=3"]) == 2
    out = capsys.readouterr().out
    best = record_of(results()).best
    assert (
        f"on 2 cores of AMD EPYC 7B13: {best.throughput:,.4g} requests/s, p99 {best.p99_ms:.3g} ms under p99<100ms, with cpu"
        in out
    )
    assert (
        f"3 instances like that machine: {3 * best.throughput:,.4g} requests/s; for another rate: tsx plan m.mar --rps N"
        in out
    )
    assert "batches take (size: ms) 1: 15.5, 2: " in out
    assert "to scale, autoscaling.target = " in out
    assert main(["deploy", "plan", str(archive), *SAID, "--json"]) == 2
    reported = json.loads(capsys.readouterr().out)["measured"]
    assert (reported["rps"], reported["configuration"]["batch_size"]) == (best.throughput, 4)


def test_scaling_that_comes_too_late_is_reported() -> None:
    kept = record_of(results())

    def view(target: str = "sagemaker", **own: Any) -> Outlook:
        found = outlook(kept, a_spec(target, sagemaker=own))
        assert found is not None
        return found

    late = view(autoscaling={"min": 1, "max": 3, "target": 500})
    assert late.lines()[-1].endswith(
        f"autoscaling.target = 500 lets more wait before a replica starts: {late.fitting_target} fits"
    )
    assert (
        f"1 instance like that machine: {kept.best.throughput:,.4g} requests/s, 3 {3 * kept.best.throughput:,.4g}"
        in view(autoscaling={"min": 1, "max": 3, "target": 1}).lines()[-1]
    )
    assert view(serverless={}).as_json()["rps_of_all"] is None
    function = view("lambda").lines()[-1].strip()
    assert function.startswith("an environment answers one request at a time: ")
    component = view(component={"endpoint": "e", "copies": 2})
    assert "2 instances like that machine" in component.lines()[-2]
    # which tsx deploy does not set there
    assert "autoscaling" not in view(multi_model={"endpoint": "e"}).lines()[-1]
    assert "2 instances like that machine" in view("kubernetes").lines()[-1]


def test_a_function_has_the_limits_that_it_was_given() -> None:
    own = {
        "memory": 1024,
        "timeout": "20s",
        "managed_instances": {"provider": "arn:aws:lambda:x", "gpu_memory": 6},
    }
    place = place_of(a_spec("lambda", **{"lambda": own}))
    assert (
        place.limits["memory"].most,
        place.limits["time"].most,
        place.limits["request"].most,
    ) == (1 << 30, 20, 6 << 20)
    assert place.device == "cuda"
    found = findings(place, ModelProfile(packed=1, unpacked=1, p99_ms=25_000.0))
    assert found[0].text.endswith(
        "Lambda ends one after 20 s. Raise lambda.timeout, make batches smaller, or use a faster machine"
    )


@pytest.mark.parametrize(
    ("component", "memory", "device"),
    [
        ({"memory": 1024}, 1 << 30, "cpu"),
        ({"memory": 1024, "gpus": 1}, None, "cuda"),
    ],  # with a GPU the weights are in its memory
)
def test_a_component_has_the_part_of_an_instance_that_it_asks_for(
    component: dict[str, Any], memory: int | None, device: str
) -> None:
    own = {"component": {"endpoint": "shared", **component}, "instance_type": "ml.g5.xlarge"}
    place = place_of(a_spec("sagemaker", sagemaker=own))
    assert (
        place.limits["memory"].most if memory else place.limits.get("memory"),
        place.device,
    ) == (memory, device)
    assert place.limits["request"].most == 6 << 20
    found = findings(place, ModelProfile(packed=1, unpacked=2 << 30))
    assert [each.text.rpartition(": ")[2] for each in found] == (
        ["raise sagemaker.component.memory"] if memory else []
    )


@pytest.mark.parametrize(
    ("target", "own", "memory"),
    [
        ("container", {"memory": "512m"}, 512 << 20),
        ("container", {"memory": "4g"}, 4 << 30),
        ("kubernetes", {"memory": "2Gi"}, 2 << 30),
    ],
)
def test_what_a_container_may_use_is_its_limit(
    target: str, own: dict[str, Any], memory: int
) -> None:
    more = {target: own | {"gpus": 1, "startup_timeout": "2m"}}
    place = place_of(a_spec(target, **more))
    assert (place.limits["memory"].most, place.limits["start"].most, place.device) == (
        memory,
        120,
        "cuda",
    )
    assert place.limits["memory"].key == f"{target}.memory"
