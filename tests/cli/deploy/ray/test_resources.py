"""What a specification becomes on a Ray cluster, and which specifications are refused."""

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
from tsx_cli.deploy.commands.locations import named, place
from tsx_cli.deploy.commands.spec_file import read_spec
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.ray import on_nodes
from tsx_cli.deploy.ray.cluster import RayCluster
from tsx_cli.deploy.ray.deployment import RayTarget, uploads
from tsx_cli.deploy.ray.kinds import Upload
from tsx_cli.deploy.ray.resources import ARCHIVE, UPLOAD, VERSION, configuration, resources
from tsx_cli.deploy.ray.running import RunningApplication
from tsx_cli.deploy.ray.spec import Ray
from tsx_cli.deploy.spec import DeploySpec

SHA = "0123456789abcdef" * 4
FACTS = Facts(Path("digits.mar"), SHA, "digits", "1.0", "", "", "")


def spec(**given: Any) -> DeploySpec:
    return read_spec(
        None, {"name": "digits", "target": "ray", "model": Path("digits.mar"), **given}
    )


def arguments(**own: Any) -> dict[str, Any]:
    found: dict[str, Any] = configuration(spec(ray=own), [FACTS], None)["Application"]
    return found


def test_an_archive_travels_through_the_object_store_unless_nodes_see_it() -> None:
    (archive, _, application) = resources(spec(), [FACTS], None)
    assert (archive.kind, archive.name) == ("Tsx::Ray::Archive", SHA)
    assert application.properties["Config"]["RoutePrefix"] == "/digits"
    (upload, _, _) = resources(spec(ray={"archives": "s3://bucket/models"}), [FACTS], None)
    assert (upload.kind, upload.name) == (
        "Tsx::Ray::Upload",
        f"bucket/models/digits/{SHA[:16]}/digits.mar",
    )
    made = resources(spec(ray={"archives": "path"}), [FACTS], None)
    assert [each.id for each in made] == ["Version", "Application"]
    assert arguments(archives="path")["models"] == [
        {"name": "digits", "source": str(Path("digits.mar").absolute()), "sha256": SHA}
    ]


def test_a_version_is_named_by_all_that_is_deployed_and_not_by_how() -> None:
    def version(**given: Any) -> Resource:
        return resources(spec(**given), [FACTS], None)[1]

    assert (
        version().name == version(ray={"address": "ray://head:10001"}, canary={"percent": 10}).name
    )
    assert version().tags == version(ray={"address": "ray://head:10001"}).tags
    assert version().name != version(env={"A": "b"}).name != version(ray={"replicas": 2}).name


def test_replicas_are_as_large_as_the_archive_was_measured_and_scale_where_its_benchmark_says() -> (
    None
):
    scaled = {"min_replicas": 0, "max_replicas": 8}
    measured = configuration(spec(ray=scaled), [FACTS], record_of(results()))[
        "Application"
    ]  # two workers, one thread each
    assert (measured["replica"]["num_cpus"], measured["replica"]["num_gpus"]) == (2, 0)
    assert measured["autoscaling"] == {
        "min_replicas": 0,
        "max_replicas": 8,
        "target_ongoing_requests": 1,
    }
    assert arguments(num_cpus=0.5, num_gpus=0.25, memory="2Gi", max_ongoing_requests=7)[
        "replica"
    ] == {
        "num_cpus": 0.5,
        "num_gpus": 0.25,
        "memory": 2 << 30,
        "max_ongoing_requests": 7,
    }
    assert arguments(**scaled, target_ongoing_requests=90)["replica"]["max_ongoing_requests"] == 180


def test_a_specification_that_scales_finds_its_cluster() -> None:
    given = {"min_replicas": 0, "max_replicas": 2}
    assert place(spec(ray=given)).cloud.own.max_replicas == 2
    assert (
        named(None, {"name": "digits", "target": "ray", "ray": given}).cloud.own.max_replicas == 2
    )


def test_several_archives_share_replicas() -> None:
    other = Facts(Path("words.mar"), SHA[::-1], "words", "1.0", "", "", "")
    shared = spec(ray={"models": "words.mar", "models_per_replica": 2})
    found = configuration(shared, [FACTS, other], None)["Application"]
    assert ([each["name"] for each in found["models"]], found["multiplexed"]) == (
        ["digits", "words"],
        2,
    )
    with pytest.raises(UsageError, match="several archives have the model name"):
        configuration(shared, [FACTS, FACTS], None)


def test_variables_and_packages_are_the_replicas_environment() -> None:
    found = configuration(
        spec(env={"A": "b"}, ray={"runtime_env": "{pip = ['pillow']}"}), [FACTS], None
    )
    assert found["RuntimeEnv"] == {"pip": ["pillow"], "env_vars": {"A": "b"}}


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_a_specification_that_cannot_be_is_refused_with_what_to_do(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        spec(ray=given)


@pytest.mark.usefixtures("course")
def test_an_archive_is_uploaded_as_it_is_and_found_again_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "digits.mar").write_bytes(b"archive")
    cloud = RayCluster(Ray(archives="s3://models/all"), partial(Cloud, "eu-central-1", None))
    where = {"LocationConstraint": "eu-central-1"}
    cloud.aws.client("s3").create_bucket(Bucket="models", CreateBucketConfiguration=where)
    name = f"models/all/digits/{SHA[:16]}/digits.mar"
    kind, wanted = (
        Upload(),
        Resource("Archive0", UPLOAD, name, {"Path": str(tmp_path / "digits.mar"), "Sha256": SHA}),
    )
    assert kind.observe(cloud, name) is None
    kind.create(cloud, wanted)
    found = kind.observe(cloud, name)
    assert found is not None
    assert found.properties == {"Sha256": SHA}
    assert (
        cloud.aws.client("s3")
        .get_object(Bucket="models", Key=name.partition("/")[2])["Body"]
        .read()
        == b"archive"
    )
    assert [each.name for each in uploads(cloud, "digits")] == [name]
    kind.delete(cloud, found)
    assert uploads(cloud, "digits") == []


def test_versions_beyond_those_that_are_kept_go_with_the_archives_that_only_they_name() -> None:
    def record(*archives: str) -> dict[str, Any]:
        return {
            "config": {
                "Application": {"models": [{"source": f"object://{each}"} for each in archives]}
            }
        }

    records = {
        "digits-1": record("a", "b"),
        "digits-2": record("b", "c", "d"),
        "digits-3": record("c"),
        "other-1": record("b"),
    }
    cloud: Any = SimpleNamespace(
        records=lambda name="": {
            key: each for key, each in records.items() if key.startswith(name)
        },
        owned=lambda *_: None,
    )
    wanted = [Resource("Archive0", ARCHIVE, "d", {}), Resource("Version", VERSION, "digits-4", {})]
    gone = RayTarget().obsolete(cloud, spec(keep=2), wanted)
    assert [each.name for each in gone] == ["a", "digits-1", "digits-2"]


def test_a_log_is_read_on_from_where_it_was_read_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_nodes, "get_serve_logs_dir", lambda: str(tmp_path / "serve"))
    file, files = tmp_path / "worker-1-2.err", {"replica": ["worker-1-*.err"]}
    file.write_text(
        ':job_id:01\n2001-01-01 00:00:00,123 first\n{"time": "2999-01-01T00:00:00.5Z"}\nlast\nhalf of a'
    )
    lines, read = on_nodes.read_logs(files, {}, 1, None)
    assert [text for _, text in lines] == ["[replica] last"]
    assert (
        len(on_nodes.read_logs(files, {}, None, 60.0)[0]) == 2
    )  # a line without a time is as old as the one before
    with file.open("a") as more:
        more.write(" line\n")
    lines, read = on_nodes.read_logs(files, read, None, None)
    assert [text for _, text in lines] == ["[replica] half of a line"]
    file.write_text("anew\n")
    assert [text for _, text in on_nodes.read_logs(files, read, None, None)[0]] == [
        "[replica] anew"
    ]


def test_models_that_share_replicas_have_no_canary() -> None:
    with pytest.raises(UsageError, match=r"without ray\.models"):
        spec(ray={"models": "a.mar", "models_per_replica": 1}, canary={"percent": 10})


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("ray://127.0.0.1:{}", "`ray start --head`"),
        ("127.0.0.1:{}", "is ray://HOST:10001"),
    ],
)
def test_a_cluster_that_does_not_answer_is_reported_with_the_next_step(
    address: str, advice: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = address.format(taken.getsockname()[1])
        with pytest.raises(CliError, match="no Ray cluster answers at") as raised:
            RayCluster(Ray(address=where), Cloud).connect()
    assert advice in raised.value.message


@pytest.mark.parametrize(
    ("error", "said"),
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
def test_a_cluster_that_refuses_this_machine_is_reported_in_its_words(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise error

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(CliError, match=said):
        RayCluster(Ray(), Cloud).connect()


def test_an_application_that_tsx_did_not_make_has_no_release_and_says_how_it_is() -> None:
    part = {
        "deployment_config": {"user_config": {"threshold": 1}},
        "message": "",
        "required_resources": {"CPU": 8},
    }
    shown = {
        "status": "DEPLOYING",
        "message": "",
        "deployments": {"Model": {**part, "replicas": [{"state": "STARTING"}]}},
    }
    application = RunningApplication(shown)
    assert (application.version, application.tags, application.share) == (None, {}, 0.0)
    assert application.condition == ("changing", "1 of its replicas (8 CPU each) have no node yet")
    failed = {
        **part,
        "message": 'failed to start 3 times. Error:\nTraceback (most recent call last):\n  File "a.py"\nLoadFailed: no weights',
        "replicas": [],
    }
    shown = {
        "status": "DEPLOY_FAILED",
        "message": "Failed to update the deployments",
        "deployments": {"Model": failed},
    }
    assert RunningApplication(shown).condition == ("failed", "LoadFailed: no weights")
