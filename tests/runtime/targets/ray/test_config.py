"""The arguments of an application, and the settings and archives of its replicas."""

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
from tsx_runtime.targets.ray.replica import ModelReplica
from tsx_runtime.targets.ray.replica_settings import read_replica_settings

MODEL = {"name": "m", "source": "/m.mar"}
DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("arguments", "reason"),
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
def test_wrong_arguments_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        parse_application({"name": "a", "models": [MODEL], **arguments})


def test_a_wrong_setting_is_refused_before_anything_is_deployed() -> None:
    with pytest.raises(SettingError, match="unknown setting 'no_such_setting'"):
        build({"name": "a", "models": [MODEL], "settings": {"no_such_setting": 1}})


@pytest.mark.slow
def test_options_applied_in_place_restart_no_replica() -> None:
    """Compare versions, since Ray Serve restarts replicas when their version changes."""

    def versions(**more: Any) -> list[str]:
        ingress = build({"name": "a", "models": [MODEL], **more})._bound_deployment
        return [ingress.version, ingress.init_args[3]._bound_deployment.version]

    first = versions()
    in_place = versions(
        release={"id": 2},
        canary={"app": "b", "percent": 5},
        repeat="all",
        autoscaling={"max_replicas": 4},
    )
    assert in_place == first
    ingress, model = versions(settings={"job_queue_size": 7})
    assert ingress == first[0]
    assert model != first[1]


def test_a_replica_uses_the_resources_assigned_by_ray(tmp_path: Path) -> None:
    def settings(options: dict[str, Any], env: dict[str, str], **resources: float) -> Settings:
        return read_replica_settings(
            options, ReplicaResources.model_validate(resources), env, tmp_path
        )

    replica_settings = settings({}, {}, num_cpus=2.5)
    assert (replica_settings.cpus, replica_settings.number_of_gpu, replica_settings.state_dir) == (
        3,
        0,
        tmp_path,
    )
    # CUDA_VISIBLE_DEVICES already names the GPU.
    assert settings({}, {}, num_gpus=0.5).number_of_gpu is None
    node = {"TSX_INFERENCE_TOKEN": "secret", "TSX_JOB_QUEUE_SIZE": "7"}
    combined_settings = settings({"job_queue_size": 9}, node)
    assert (combined_settings.inference_token, combined_settings.job_queue_size) == ("secret", 9)


def test_an_archive_is_checked_against_its_sha256(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.mar", "def handle(data, context): ...")
    settings = Settings(cache_dir=tmp_path / "cache")

    def open_path(path: Path, digest: str) -> Any:
        return open_model(RayModel(name="m", source=str(path), sha256=digest), settings)

    with path.open("rb") as file:
        digest = content_digest(file)
    with open_path(path, digest) as archive:
        assert archive.digest == digest
    with pytest.raises(InvalidModel, match="changed since it was deployed"):
        open_path(path, DIGEST)
    with pytest.raises(InvalidModel, match="is a directory"):
        open_path(make_model(tmp_path / "d", ""), DIGEST)


@pytest.mark.parametrize("source", ["object://{}", "s3://bucket/models/m.mar"])
def test_a_node_downloads_an_archive_once_and_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    content = make_model(tmp_path / "m.mar", "def handle(data, context): ...").read_bytes()
    contents: list[bytes] = []

    def download(url: ModelUrl, part: Path, *_: object) -> None:
        part.write_bytes(contents.pop())

    monkeypatch.setattr(
        "tsx_runtime.targets.ray.archives._pieces", lambda digest: iter([contents.pop()])
    )
    monkeypatch.setattr("tsx_runtime.sources.s3.download", download)
    digest = hashlib.sha256(content).hexdigest()
    model = RayModel(name="m", source=source.format(digest), sha256=digest)
    settings = Settings(cache_dir=tmp_path / "cache")
    contents.append(content[:-1])
    with pytest.raises(DownloadFailed, match="sha-256"):
        open_model(model, settings)
    contents.append(content)
    # The second time the archive is already there.
    for _ in range(2):
        with open_model(model, settings) as archive:
            assert (archive.digest, archive.manifest.model_name) == (digest, "m")


def test_an_archive_is_kept_after_all_pieces_from_any_node_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.put", lambda piece: piece)
    holder = ArchiveHolder()
    # Two nodes upload it at the same time.
    for number, piece in ((0, b"a"), (0, b"a"), (1, b"b"), (1, b"b")):
        holder.add(DIGEST, number, piece)
    holder.finish(DIGEST, 2)
    holder.add(DIGEST, 1, b"b")
    holder.finish(DIGEST, 2)
    assert holder._incomplete == {}
    holder.add(DIGEST, 0, b"a")
    holder.cancel(DIGEST)
    assert (holder.pieces(DIGEST), holder._incomplete) == ([b"a", b"b"], {})
    holder.remove(DIGEST)
    holder.add(DIGEST, 1, b"b")
    with pytest.raises(ValueError, match="1 of 2 pieces"):
        holder.finish(DIGEST, 2)
    assert holder.pieces(DIGEST) == []


@pytest.mark.parametrize(
    ("state", "healthy"),
    [(WorkerState.READY, True), (WorkerState.FAILED, False), (WorkerState.LOADING, True)],
)
def test_a_replica_with_only_given_up_workers_is_replaced(
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
