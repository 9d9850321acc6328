"""Snapshots of a server's models, from which the next server starts."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.models import make_model
from tsx_runtime.api.management.describe import unready_versions
from tsx_runtime.api.management.service import ManagementService
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.errors import ModelNotFound, SettingError
from tsx_runtime.features.jobs.executor import RequestExecutor
from tsx_runtime.features.jobs.storage.store import StoredRequest
from tsx_runtime.features.rollouts.feature import RolloutsFeature
from tsx_runtime.features.rollouts.policy import RolloutPlan
from tsx_runtime.features.torchserve.snapshots import (
    MAX_SNAPSHOTS,
    Snapshots,
    last_snapshot,
    snapshot_to_start_from,
)
from tsx_runtime.server.startup import (
    load_all,
    models_from_settings,
    register_all,
    start_model,
)
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.settings.torchserve import Snapshot
from tsx_runtime.settings.traffic_policy import parse_traffic
from tsx_runtime.wire import request_meta

NOOP = "def handle(data, context):\n    return ['x']\n"

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def a_registry(settings: Settings) -> AsyncIterator[Registry]:
    registry = Registry(settings)
    try:
        yield registry
    finally:
        await registry.close()


def make_noops(store: Path, *names: str) -> None:
    """Make an archive NAME.mar for each name; the name ends with the version."""
    for name in names:
        make_model(store / f"{name}.mar", NOOP, name=name[:-3], version=name[-3:])


def write_startup(directory: Path, clock: Callable[[], float] = time.time) -> Path:
    """Write the snapshot of a server without models."""
    Snapshots(directory, {}, None, clock=clock).write("startup", Registry(Settings()))
    path = last_snapshot(directory)
    assert path is not None
    return path


def settings_of_snapshot(directory: Path, store: Path) -> Settings:
    """Return the settings of a server that starts from the last snapshot."""
    last = last_snapshot(directory)
    assert last is not None
    return load_settings({"model_store": store}, {}, last)[0]


async def unread(id: str) -> StoredRequest | None:
    raise AssertionError(f"job {id} was read")


def snapshot_kinds(directory: Path) -> list[str]:
    return [path.stem.partition("-")[2] for path in sorted(directory.iterdir())]


async def test_the_next_server_restores_the_models_of_the_snapshot(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "logs" / "config"
    make_noops(store, "noop1.0", "noop2.0")
    external_model = make_model(tmp_path / "elsewhere", NOOP)
    snapshots = Snapshots(directory, {"job_queue_size": "7", "model_snapshot": "old"}, store)
    async with a_registry(Settings(model_store=store)) as registry:
        await registry.register(
            RegisterOrder(url="noop1.0.mar", initial_workers=0, batch_size=4, response_timeout=5)
        )
        snapshots.begin(registry)
        await registry.register(RegisterOrder(url="noop2.0.mar", initial_workers=0))
        with pytest.raises(ModelNotFound):
            await registry.register(RegisterOrder(url="none.mar"))
        await registry.register_path(external_model, RegisterOrder(url="elsewhere", slo="p99<1s"))
        registry.set_default("noop", "2.0")
        await registry.scale("noop", "1.0", 0, 3)
        registry.change("noop", "1.0", {"max_batch_delay": 9})
        snapshots.end(registry)
        await registry.unregister("elsewhere")
    assert snapshot_kinds(directory) == [
        "startup",
        "snapshot",
        "snapshot",
        "snapshot",
        "snapshot",
        "shutdown",
    ]
    last = last_snapshot(directory)
    assert last is not None
    assert stat.S_IMODE(last.stat().st_mode) == 0o600
    settings = settings_of_snapshot(directory, store)
    assert settings.job_queue_size == 7
    assert settings.model_snapshot is not None
    assert (settings.model_snapshot.name, settings.model_snapshot.model_count) == (last.name, 3)
    async with a_registry(settings) as registry:
        versions = await register_all(registry, models_from_settings(settings))
        models_by_version = {(version.name, version.version): version for version in versions}
        assert set(models_by_version) == {("noop", "1.0"), ("noop", "2.0"), ("elsewhere", "1.0")}
        first = models_by_version["noop", "1.0"]
        assert (first.min_workers, first.max_workers, first.batch_size) == (0, 3, 4)
        assert (first.plan.max_batch_delay, first.plan.response_timeout) == (9, 5)
        assert models_by_version["elsewhere", "1.0"].plan.slo == "p99<1s"
        assert (first.url, first.loaded_at_startup) == ("noop1.0.mar", False)
        assert registry.find("noop").version == "2.0"


def versions_in_snapshot(directory: Path) -> dict[tuple[str, str], tuple[bool, int | None]]:
    """Return the default flag and batch size of each version in the last snapshot."""
    snapshot = settings_of_snapshot(directory, directory).model_snapshot
    assert snapshot is not None
    return {
        (name, number): (version.default_version, version.batch_size)
        for name, versions in snapshot.models.items()
        for number, version in versions.items()
    }


async def test_an_unloadable_model_stays_in_the_snapshot_until_unregistered(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "config"
    names = ("noop1.0", "noop2.0", "other1.0", "third1.0")
    make_noops(store, *names)
    snapshots = Snapshots(directory, {}, store)
    async with a_registry(Settings(model_store=store)) as registry:
        snapshots.begin(registry)
        for name in names:
            await registry.register(
                RegisterOrder(url=f"{name}.mar", initial_workers=0, batch_size=4)
            )
        registry.set_default("noop", "2.0")
        registry.set_traffic(
            "noop", parse_traffic({"labels": {"stable": "2.0"}, "weights": {"1.0": 1, "2.0": 3}})
        )
    all_of_them = {
        ("noop", "1.0"): (False, 4),
        ("noop", "2.0"): (True, 4),
        ("other", "1.0"): (True, 4),
        ("third", "1.0"): (True, 4),
    }
    assert versions_in_snapshot(directory) == all_of_them
    for name in ("noop2.0", "other1.0", "third1.0"):
        (store / f"{name}.mar").rename(tmp_path / name)
        (store / f"{name}.mar").write_text("junk")
    async with a_registry(settings_of_snapshot(directory, store)) as registry:
        await register_all(registry, models_from_settings(registry.settings))
        snapshots.begin(registry)
        assert registry.find("noop").version == "1.0"
        assert versions_in_snapshot(directory) == all_of_them
        assert sorted(model.model_name for model in unready_versions(registry)) == [
            "other",
            "third",
        ]
        executor = RequestExecutor(registry, 1, unread)
        assert [
            executor.capacity(target)
            for target in (("other", ""), ("noop", "2.0"), ("noop", "3.0"), ("none", ""))
        ] == [0, 0, None, None]
        with pytest.raises(ModelNotFound, match=r"version 1\.0 could not be loaded at the start"):
            await ManagementService(registry).describe("other", None, customized=False)
        await registry.unregister("other")
        with pytest.raises(ModelNotFound):
            await registry.unregister("other")
        (store / "third1.0.mar").unlink()
        (tmp_path / "third1.0").rename(store / "third1.0.mar")
        await registry.register(RegisterOrder(url="third1.0.mar", initial_workers=0))
        await registry.unregister("third")
        registry.set_traffic("noop", parse_traffic({"labels": {"stable": "2.0"}}))
        assert versions_in_snapshot(directory) == {
            key: value for key, value in all_of_them.items() if key[0] == "noop"
        }
    (store / "noop2.0.mar").unlink()
    (tmp_path / "noop2.0").rename(store / "noop2.0.mar")
    async with a_registry(settings_of_snapshot(directory, store)) as registry:
        await register_all(registry, models_from_settings(registry.settings))
        assert (registry.find("noop").version, registry.find("noop", "stable").version) == (
            "2.0",
            "2.0",
        )


async def test_a_default_version_set_while_another_is_missing_is_kept(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "config"
    make_noops(store, "noop1.0", "noop2.0")
    (store / "noop3.0.mar").write_text("junk")
    versions: dict[str, dict[str, object]] = {
        number: {"marName": f"noop{number}.mar", "minWorkers": 0}
        for number in ("1.0", "2.0", "3.0")
    }
    versions["3.0"]["defaultVersion"] = True
    snapshot = Snapshot.model_validate({"models": {"noop": versions}})
    async with a_registry(Settings(model_store=store, model_snapshot=snapshot)) as registry:
        await register_all(registry, models_from_settings(registry.settings))
        Snapshots(directory, {}, store).begin(registry)
        assert versions_in_snapshot(directory)["noop", "3.0"][0]
        registry.set_default("noop", "2.0")
        assert [
            key[1] for key, (is_default, _) in versions_in_snapshot(directory).items() if is_default
        ] == ["2.0"]


@pytest.mark.parametrize("saved_default", ["2.0", None])
async def test_a_set_default_version_survives_a_start_without_it(
    processes: None, tmp_path: Path, saved_default: str | None
) -> None:
    """Keep the choice across traffic changes while another version is the default."""
    make_noops(tmp_path, "noop1.0", "noop2.0")
    settings = Settings(model_store=tmp_path, state_dir=tmp_path / "state")
    first, both_versions = (
        [start_model(tmp_path / f"noop{version}.mar") for version in versions]
        for versions in (["1.0"], ["1.0", "2.0"])
    )
    async with a_registry(settings) as registry:
        await load_all(registry, both_versions)
        if saved_default is not None:
            registry.set_default("noop", saved_default)
    async with a_registry(settings) as registry:
        await load_all(registry, first)
        registry.set_traffic("noop", parse_traffic({"labels": {"stable": "1.0"}}))
    async with a_registry(settings) as registry:
        await load_all(registry, both_versions)
        assert registry.find("noop").version == (saved_default or "1.0")


@pytest.mark.usefixtures("processes")
async def test_a_default_version_from_a_rollout_or_rollback_is_kept(tmp_path: Path) -> None:
    store, directory = tmp_path / "store", tmp_path / "config"
    make_noops(store, "noop1.0", "noop2.0")
    snapshots = Snapshots(directory, {}, store)

    def default_versions() -> list[str]:
        return [
            number
            for (_, number), (is_default, _) in versions_in_snapshot(directory).items()
            if is_default
        ]

    async with a_registry(Settings(model_store=store, worker_preload=False)) as registry:
        for version in ("1.0", "2.0"):
            await registry.register(RegisterOrder(url=f"noop{version}.mar", initial_workers=1))
        snapshots.begin(registry)
        rollout_finished = asyncio.Event()
        registry.on_managed.append(rollout_finished.set)
        plan = RolloutPlan(
            version="2.0", steps=(100,), bake=0.1, max_error_rate=0.5, min_requests=1
        )
        registry.feature(RolloutsFeature).rollouts.start("noop", plan)
        job = WaitingJob(request_meta("1", b"", []), b"", time.monotonic())
        registry.route("noop").submit(job)
        await job.done
        await asyncio.wait_for(rollout_finished.wait(), 60)
        assert default_versions() == ["2.0"]
        registry.traffic_manager.rollback("noop")
        assert default_versions() == ["1.0"]
        registry.on_managed.clear()


def test_simultaneous_changes_have_separate_files_and_old_ones_are_removed(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, {}, None, clock=lambda: 1700000000.5)
    registry = Registry(Settings())
    for _ in range(MAX_SNAPSHOTS + 5):
        snapshots.write("snapshot", registry)
    snapshots.write("shutdown", registry)
    assert len(snapshot_kinds(tmp_path)) == MAX_SNAPSHOTS + 1
    last = last_snapshot(tmp_path)
    assert last is not None
    assert last.name.endswith("-shutdown.cfg")


def test_the_last_snapshot_is_the_one_with_the_latest_time(tmp_path: Path) -> None:
    assert last_snapshot(tmp_path / "none") is None
    for name in (
        "20260101000000000-startup.cfg",
        "20260101000000001-snapshot.cfg",
        "20250101000000000-shutdown.cfg",
        "zzz.cfg",
    ):
        (tmp_path / name).touch()
    assert last_snapshot(tmp_path) == tmp_path / "20260101000000001-snapshot.cfg"


def test_an_unwritable_directory_only_loses_the_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    Snapshots(tmp_path / "file" / "config", {}, None).write("startup", Registry(Settings()))
    assert "no snapshot was written" in caplog.text


def test_load_models_accepts_files_directories_urls_and_all(tmp_path: Path) -> None:
    make_model(tmp_path / "a.mar", NOOP)
    make_model(tmp_path / "b", NOOP)
    for name in ("readme.txt", "._a.mar"):
        (tmp_path / name).touch()
    for name in (".cache", "lost+found"):
        (tmp_path / name).mkdir()

    def entries(
        *names: str, store: Path | None = tmp_path
    ) -> list[tuple[Path | None, str, str | None]]:
        starts = models_from_settings(Settings(model_store=store, load_models=list(names)))
        return [(start.path, start.order.url, start.order.model_name) for start in starts]

    assert entries() == []
    assert entries("ALL") == [(tmp_path / "a.mar", "a.mar", None), (tmp_path / "b", "b", None)]
    assert entries("a.mar", "x=b", "y=/opt/ml/model") == [
        (tmp_path / "a.mar", "a.mar", None),
        (tmp_path / "b", "b", "x"),
        (Path("/opt/ml/model"), "/opt/ml/model", "y"),
    ]
    assert entries("https://host/a.mar?x=1", "n=s3://b/a.mar", store=None) == [
        (None, "https://host/a.mar?x=1", None),
        (None, "s3://b/a.mar", "n"),
    ]
    for names in (["all"], ["a.mar"]):
        with pytest.raises(SettingError, match="model_store is not set"):
            entries(*names, store=None)


def test_a_missing_snapshot_is_reported() -> None:
    snapshot = Snapshot.model_validate({"models": {"a": {"1.0": {"minWorkers": 1}}}})
    with pytest.raises(SettingError, match=r"model_snapshot.models.a.1.0 has no marName"):
        models_from_settings(Settings(model_snapshot=snapshot))


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_a_snapshot_writable_by_others_prevents_the_start(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "config"
    last = write_startup(directory)
    assert snapshot_to_start_from(directory) == last
    if kind == "link":
        last.rename(tmp_path / "elsewhere")
        last.symlink_to(tmp_path / "elsewhere")
    else:
        (directory if kind == "directory" else last).chmod(0o777)
    with pytest.raises(SettingError, match=r"cannot be trusted.*--ncs"):
        snapshot_to_start_from(directory)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"job_queue_size=5\n"])
def test_a_corrupt_snapshot_prevents_the_start(tmp_path: Path, content: bytes) -> None:
    write_startup(tmp_path).write_bytes(content)
    with pytest.raises(SettingError, match=r"no model_snapshot.*--ncs"):
        snapshot_to_start_from(tmp_path)


def test_no_snapshot_is_written_to_a_directory_writable_by_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    Snapshots(tmp_path, {}, None).write("startup", Registry(Settings()))
    assert list(tmp_path.iterdir()) == []
    assert "no snapshot was written" in caplog.text


def test_a_symlink_at_a_snapshot_is_replaced_and_not_followed(tmp_path: Path) -> None:
    snapshot = write_startup(tmp_path, lambda: 1e9)
    snapshot.unlink()
    (tmp_path / "victim").touch()
    snapshot.symlink_to(tmp_path / "victim")
    write_startup(tmp_path, lambda: 1e9 - 1)
    assert (tmp_path / "victim").read_bytes() == b""
