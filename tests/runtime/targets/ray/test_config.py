"""The arguments of an application, and the settings that a replica derives from them and from what
Ray gives it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.models import make_model
from tsx_archiver.storage.digest import content_digest
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import DownloadFailed, InvalidModel, SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import ModelUrl
from tsx_runtime.targets.ray.application import build
from tsx_runtime.targets.ray.archives import ArchiveHolder, open_model
from tsx_runtime.targets.ray.config import RayModel, ReplicaResources, parse_application
from tsx_runtime.targets.ray.replica import ModelReplica, replica_settings

MODEL = {"name": "m", "source": "/m.mar"}
DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"models": []}, "models"),
        ({"models": [MODEL, {"name": "n", "source": "/n"}]}, "multiplexed"),
        ({"models": [MODEL, MODEL], "multiplexed": 1}, "several models are called m"),
        ({"models": [{**MODEL, "source": "object://abc"}]}, "sha-256"),
        ({"models": [{**MODEL, "source": "s3://bucket/m.mar"}]}, "needs sha256"),
        ({"models": [{**MODEL, "name": "../m"}]}, "model name"),
        ({"replicas": 1, "autoscaling": {"max_replicas": 2}}, "not both"),
        ({"canary": {"app": "a", "percent": 101}}, "canary.percent"),
        ({"canary": {"app": "a", "percent": 1}}, "another application"),
        ({"workers": 3}, "workers"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        parse_application({"name": "a", "models": [MODEL], **args})


def test_a_wrong_setting_is_told_before_anything_is_deployed() -> None:
    with pytest.raises(SettingError, match="unknown setting 'no_such_setting'"):
        build({"name": "a", "models": [MODEL], "settings": {"no_such_setting": 1}})


def test_what_changes_in_place_changes_no_replica() -> None:
    """Ray Serve restarts the replicas of a deployment whose version changes."""

    def versions(**more: Any) -> list[str]:
        ingress = build({"name": "a", "models": [MODEL], **more})._bound_deployment
        return [ingress.version, ingress.init_args[3]._bound_deployment.version]

    same = versions()
    assert (
        versions(
            release={"id": 2},
            canary={"app": "b", "percent": 5},
            repeat="all",
            autoscaling={"max_replicas": 4},
        )
        == same
    )
    ingress, model = versions(settings={"job_queue_size": 7})
    assert ingress == same[0]
    assert model != same[1]


def test_a_replica_uses_what_ray_has_given_it(tmp_path: Path) -> None:
    def settings(given: dict[str, Any], env: dict[str, str], **resources: float) -> Settings:
        return replica_settings(given, ReplicaResources.model_validate(resources), env, tmp_path)

    plain = settings({}, {}, num_cpus=2.5)
    assert (plain.cpus, plain.number_of_gpu, plain.state_dir) == (3, 0, tmp_path)
    assert settings({}, {}, num_gpus=0.5).number_of_gpu is None  # CUDA_VISIBLE_DEVICES has it
    node = {"TSX_INFERENCE_TOKEN": "secret", "TSX_JOB_QUEUE_SIZE": "7"}
    both = settings({"job_queue_size": 9}, node)
    assert (both.inference_token, both.job_queue_size) == ("secret", 9)


def test_an_archive_is_checked_against_its_sha256(tmp_path: Path) -> None:
    path, settings = (
        make_model(tmp_path / "m.mar", "def handle(data, context): ..."),
        Settings(cache_dir=tmp_path / "cache"),
    )
    with path.open("rb") as file:
        digest = content_digest(file)
    with open_model(RayModel(name="m", source=str(path), sha256=digest), settings) as archive:
        assert archive.digest == digest
    with pytest.raises(InvalidModel, match="changed since it was deployed"):
        open_model(RayModel(name="m", source=str(path), sha256=DIGEST), settings)
    with pytest.raises(InvalidModel, match="is a directory"):
        open_model(
            RayModel(name="m", source=str(make_model(tmp_path / "d", "")), sha256=DIGEST), settings
        )


@pytest.mark.parametrize("source", ["object://{}", "s3://bucket/models/m.mar"])
def test_a_node_fetches_an_archive_once_and_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    content = make_model(tmp_path / "m.mar", "def handle(data, context): ...").read_bytes()
    sent: list[bytes] = []  # what is fetched next

    def download(url: ModelUrl, part: Path, *_: object) -> None:
        part.write_bytes(sent.pop())

    monkeypatch.setattr(
        "tsx_runtime.targets.ray.archives._pieces", lambda digest: iter([sent.pop()])
    )
    monkeypatch.setattr("tsx_runtime.sources.s3.download", download)
    digest = hashlib.sha256(content).hexdigest()
    model = RayModel(name="m", source=source.format(digest), sha256=digest)
    settings = Settings(cache_dir=tmp_path / "cache")
    sent.append(content[:-1])
    with pytest.raises(DownloadFailed, match="sha-256"):
        open_model(model, settings)
    sent.append(content)
    for _ in range(2):  # the second time there is nothing to fetch
        with open_model(model, settings) as archive:
            assert (archive.digest, archive.manifest.model_name) == (digest, "m")


def test_an_archive_is_kept_once_all_its_pieces_are_there_whoever_sent_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.put", lambda piece: piece)
    holder = ArchiveHolder()
    for number, piece in [
        (0, b"a"),
        (0, b"a"),
        (1, b"b"),
        (1, b"b"),
    ]:  # of two that upload it at the same time
        holder.add(DIGEST, number, piece)
    holder.finish(DIGEST, 2)
    holder.add(DIGEST, 1, b"b")
    holder.finish(DIGEST, 2)
    assert holder._arriving == {}
    holder.add(DIGEST, 0, b"a")
    holder.cancel(DIGEST)
    assert (holder.pieces(DIGEST), holder._arriving) == ([b"a", b"b"], {})
    holder.remove(DIGEST)
    holder.add(DIGEST, 1, b"b")
    with pytest.raises(ValueError, match="1 of 2 pieces"):
        holder.finish(DIGEST, 2)
    assert holder.pieces(DIGEST) == []


@pytest.mark.parametrize(
    ("state", "healthy"),
    [(WorkerState.READY, True), (WorkerState.FAILED, False), (WorkerState.LOADING, True)],
)
def test_a_replica_whose_workers_are_all_given_up_is_replaced(
    state: WorkerState, healthy: bool
) -> None:
    version = SimpleNamespace(
        name="m", min_workers=1, workers=[SimpleNamespace(state=state)], last_error="no GPU"
    )
    model = cast("Any", object.__new__(ModelReplica))
    model._registry = SimpleNamespace(models={"m": SimpleNamespace(versions={"1": version})})
    if healthy:
        model.check_health()
    else:
        with pytest.raises(RuntimeError, match="no GPU"):
            model.check_health()
