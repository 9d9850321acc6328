"""The resources of a specification on a Ray cluster, and specifications that are refused."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.benchmarked import results
from tsx_cli.bench.report.archive_record import record_of
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.commands.spec_file import read_named_spec, read_spec
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.ray import on_nodes
from tsx_cli.deploy.ray.cluster import RayCluster
from tsx_cli.deploy.ray.deployment import RayPlatform, uploaded_archives
from tsx_cli.deploy.ray.kinds import Upload
from tsx_cli.deploy.ray.resources import ARCHIVE, UPLOAD, VERSION, configuration, resources
from tsx_cli.deploy.ray.running import RunningApplication
from tsx_cli.deploy.ray.spec import Ray
from tsx_cli.deploy.ray.target import TARGET
from tsx_cli.deploy.spec import DeploySpec

SHA = "0123456789abcdef" * 4
FACTS = Facts(Path("digits.mar"), SHA, "digits", "1.0", "", "", "")


def spec(**settings: Any) -> DeploySpec:
    required = {"name": "digits", "target": "ray", "model": Path("digits.mar")}
    return read_spec(None, required | settings)


def arguments(**ray: Any) -> dict[str, Any]:
    """Return the arguments of the application of a specification."""
    application: dict[str, Any] = configuration(spec(ray=ray), [FACTS], None)["Application"]
    return application


def test_an_archive_is_sent_through_the_object_store_unless_it_is_reachable() -> None:
    (archive, _, application) = resources(spec(), [FACTS], None)
    assert (archive.kind, archive.name) == ("Tsx::Ray::Archive", SHA)
    assert application.properties["Config"]["RoutePrefix"] == "/digits"
    (upload, _, _) = resources(spec(ray={"archives": "s3://bucket/models"}), [FACTS], None)
    assert upload.kind == "Tsx::Ray::Upload"
    assert upload.name == f"bucket/models/digits/{SHA[:16]}/digits.mar"
    deployed = resources(spec(ray={"archives": "path"}), [FACTS], None)
    assert [resource.id for resource in deployed] == ["Version", "Application"]
    assert arguments(archives="path")["models"] == [
        {"name": "digits", "source": str(Path("digits.mar").absolute()), "sha256": SHA}
    ]


def test_a_versions_name_depends_only_on_its_content() -> None:
    def version(**settings: Any) -> Resource:
        return resources(spec(**settings), [FACTS], None)[1]

    address = {"address": "ray://head:10001"}
    assert version().name == version(ray=address, canary={"percent": 10}).name
    assert version().tags == version(ray=address).tags
    assert version().name != version(env={"A": "b"}).name != version(ray={"replicas": 2}).name


def test_replicas_are_sized_and_scaled_by_the_benchmark() -> None:
    scaled = {"min_replicas": 0, "max_replicas": 8}
    record = record_of(results())
    measured = configuration(spec(ray=scaled), [FACTS], record)["Application"]
    # The benchmark has two workers with one thread each.
    assert (measured["replica"]["num_cpus"], measured["replica"]["num_gpus"]) == (2, 0)
    assert measured["autoscaling"] == {**scaled, "target_ongoing_requests": 1}
    size = {"num_cpus": 0.5, "num_gpus": 0.25, "max_ongoing_requests": 7}
    assert arguments(**size, memory="2Gi")["replica"] == {**size, "memory": 2 << 30}
    assert arguments(**scaled, target_ongoing_requests=90)["replica"]["max_ongoing_requests"] == 180


def test_a_scaling_specification_needs_a_cluster() -> None:
    ray = {"min_replicas": 0, "max_replicas": 2}
    assert TARGET.locate(spec(ray=ray)).cloud.settings.max_replicas == 2
    settings = {"name": "digits", "target": "ray", "ray": ray}
    assert TARGET.locate(read_named_spec(None, settings)).cloud.settings.max_replicas == 2


def test_several_archives_can_share_replicas() -> None:
    second = Facts(Path("words.mar"), SHA[::-1], "words", "1.0", "", "", "")
    shared = spec(ray={"models": "words.mar", "models_per_replica": 2})
    application = configuration(shared, [FACTS, second], None)["Application"]
    assert [model["name"] for model in application["models"]] == ["digits", "words"]
    assert application["multiplexed"] == 2
    with pytest.raises(UsageError, match="several archives have the model name"):
        configuration(shared, [FACTS, FACTS], None)


def test_variables_and_packages_become_the_replicas_environment() -> None:
    specification = spec(env={"A": "b"}, ray={"runtime_env": "{pip = ['pillow']}"})
    environment = configuration(specification, [FACTS], None)["RuntimeEnv"]
    assert environment == {"pip": ["pillow"], "env_vars": {"A": "b"}}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"min_replicas": 1}, "max_replicas belong together"),
        ({"min_replicas": 3, "max_replicas": 2}, "is 3, and max_replicas is 2"),
        ({"replicas": 2, "min_replicas": 1, "max_replicas": 2}, "replicas is a fixed number"),
        ({"target_ongoing_requests": 4}, "set min_replicas and max_replicas"),
        (
            {
                "min_replicas": 0,
                "max_replicas": 2,
                "target_ongoing_requests": 9,
                "max_ongoing_requests": 4,
            },
            "a replica never has 9 requests",
        ),
        ({"num_gpus": 1.5}, "write 0.5, 1 or 2"),
        ({"models": "a.mar"}, "models_per_replica belong together"),
        ({"archives": "ftp://x"}, "String should match"),
        ({"runtime_env": {"working_dir": "."}}, "upload it as a zip"),
        ({"runtime_env": {"env_vars": {}}}, "set variables of the replicas in env"),
        ({"address": "head"}, "String should match"),
    ],
)
def test_an_impossible_specification_is_refused_with_a_remedy(
    settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(UsageError, match=error):
        spec(ray=settings)


@pytest.mark.usefixtures("scenario")
def test_an_uploaded_archive_is_listed_until_its_removal(tmp_path: Path) -> None:
    (tmp_path / "digits.mar").write_bytes(b"archive")
    cloud = RayCluster(Ray(archives="s3://models/all"), partial(Cloud, "eu-central-1", None))
    s3 = cloud.aws.client("s3")
    bucket_configuration = {"LocationConstraint": "eu-central-1"}
    s3.create_bucket(Bucket="models", CreateBucketConfiguration=bucket_configuration)
    key = f"all/digits/{SHA[:16]}/digits.mar"
    name = f"models/{key}"
    properties = {"Path": str(tmp_path / "digits.mar"), "Sha256": SHA}
    kind = Upload()
    assert kind.observe(cloud, name) is None
    kind.create(cloud, Resource("Archive0", UPLOAD, name, properties))
    observed = kind.observe(cloud, name)
    assert observed is not None
    assert observed.properties == {"Sha256": SHA}
    assert s3.get_object(Bucket="models", Key=key)["Body"].read() == b"archive"
    assert [upload.name for upload in uploaded_archives(cloud, "digits")] == [name]
    kind.delete(cloud, observed)
    assert uploaded_archives(cloud, "digits") == []


def test_old_versions_are_removed_with_their_unshared_archives() -> None:
    def record(*archives: str) -> dict[str, Any]:
        models = [{"source": f"object://{archive}"} for archive in archives]
        return {"config": {"Application": {"models": models}}}

    records = {
        "digits-1": record("a", "b"),
        "digits-2": record("b", "c", "d"),
        "digits-3": record("c"),
        "other-1": record("b"),
    }
    cloud: Any = SimpleNamespace(
        records=lambda name="": {
            key: record for key, record in records.items() if key.startswith(name)
        },
        find_owned=lambda *_: None,
    )
    desired_resources = [
        Resource("Archive0", ARCHIVE, "d", {}),
        Resource("Version", VERSION, "digits-4", {}),
    ]
    obsolete = RayPlatform().obsolete_resources(cloud, spec(keep=2), desired_resources)
    assert [resource.name for resource in obsolete] == ["a", "digits-1", "digits-2"]


def test_a_log_is_read_from_the_last_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_nodes, "get_serve_logs_dir", lambda: str(tmp_path / "serve"))
    file, files = tmp_path / "worker-1-2.err", {"replica": ["worker-1-*.err"]}
    file.write_text(
        ':job_id:01\n2001-01-01 00:00:00,123 first\n{"time": "2999-01-01T00:00:00.5Z"}\nlast\nhalf of a'
    )
    lines, read = on_nodes.read_logs(files, {}, 1, None)
    assert [text for _, text in lines] == ["[replica] last"]
    # A line without a time counts as old as the previous one.
    assert len(on_nodes.read_logs(files, {}, None, 60.0)[0]) == 2
    with file.open("a") as more:
        more.write(" line\n")
    lines, read = on_nodes.read_logs(files, read, None, None)
    assert [text for _, text in lines] == ["[replica] half of a line"]
    file.write_text("anew\n")
    lines, _ = on_nodes.read_logs(files, read, None, None)
    assert [text for _, text in lines] == ["[replica] anew"]


def test_shared_replicas_have_no_canary() -> None:
    with pytest.raises(UsageError, match=r"without ray\.models"):
        spec(ray={"models": "a.mar", "models_per_replica": 1}, canary={"percent": 10})


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("ray://127.0.0.1:{}", "`ray start --head`"),
        ("127.0.0.1:{}", "is ray://HOST:10001"),
    ],
)
def test_an_unreachable_cluster_is_reported_with_a_remedy(address: str, advice: str) -> None:
    with socket.socket() as busy_socket:
        busy_socket.bind(("127.0.0.1", 0))
        url = address.format(busy_socket.getsockname()[1])
        with pytest.raises(CliError, match="no Ray cluster answers at") as raised:
            RayCluster(Ray(address=url), Cloud).connect()
    assert advice in raised.value.message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError(
                "Version mismatch: The cluster was started with:\n    Ray: 2.55.0\n    Python: 3.12.1\nThis process..."
            ),
            "Version mismatch: The cluster was started with: Ray: 2.55.0 Python: 3.12.1.* same versions of Python and Ray",
        ),
        (
            ConnectionError("Could not find any running Ray instance. Please specify"),
            "auto is for the cluster's nodes",
        ),
    ],
)
def test_a_cluster_that_refuses_the_client_is_reported_with_its_reason(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise error

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(CliError, match=message):
        RayCluster(Ray(), Cloud).connect()


def test_a_foreign_application_has_a_condition_but_no_release() -> None:
    part = {
        "deployment_config": {"user_config": {"threshold": 1}},
        "message": "",
        "required_resources": {"CPU": 8},
    }
    state = {
        "status": "DEPLOYING",
        "message": "",
        "deployments": {"Model": {**part, "replicas": [{"state": "STARTING"}]}},
    }
    application = RunningApplication(state)
    assert (application.version, application.tags, application.canary_percent) == (None, {}, 0.0)
    assert application.condition == ("changing", "1 of its replicas (8 CPU each) have no node yet")
    failed = {
        **part,
        "message": 'failed to start 3 times. Error:\nTraceback (most recent call last):\n  File "a.py"\nLoadFailed: no weights',
        "replicas": [],
    }
    state = {
        "status": "DEPLOY_FAILED",
        "message": "Failed to update the deployments",
        "deployments": {"Model": failed},
    }
    assert RunningApplication(state).condition == ("failed", "LoadFailed: no weights")
