"""Changes made while a server runs; the next server reads them from disk."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.talker import a_registry
from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.persistence import StateStore, state_directory
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import Conflict
from tsx_runtime.settings.schema import Settings
from tsx_runtime.settings.traffic_policy import NOTHING, Traffic, parse_traffic

pytestmark = pytest.mark.anyio
HANDLER = "def handle(data, context):\n    return data and ['ok'] * len(data)\n"


def close_state(state: StateStore) -> None:
    asyncio.run(state.written())
    state.close()


def test_saved_state_is_read_by_the_next_server(tmp_path: Path) -> None:
    state = StateStore(tmp_path)
    state.save("digits", traffic={"weights": {"1.0": 1}}, digest="a")
    state.save("digits", rollout={"step": 2}, digest=None)
    state.save("faces", traffic={})
    state.save("gone", traffic={})
    state.forget("gone")
    close_state(state)
    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == [
        "digits.json",
        "faces.json",
    ]
    reopened_store = StateStore(tmp_path)
    assert reopened_store.load("digits") == {
        "traffic": {"weights": {"1.0": 1}},
        "rollout": {"step": 2},
    }
    assert reopened_store.load("gone") == {}


def test_the_last_of_many_changes_is_saved(tmp_path: Path) -> None:
    state = StateStore(tmp_path)
    for number in range(200):
        state.save("digits", number=number)
    close_state(state)
    assert json.loads((tmp_path / "models" / "digits.json").read_text()) == {"number": 199}


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_corrupt_file_is_ignored_and_reported(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "digits.json").write_text(text)
    assert StateStore(tmp_path).load("digits") == {}
    assert "digits.json is ignored" in caplog.text


def test_unwritable_state_stays_in_memory_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    for state in (StateStore(tmp_path / "taken"), StateStore(None)):
        caplog.clear()
        state.save("digits", traffic={})
        state.save("digits", traffic={"sticky": "header:a"})
        close_state(state)
        assert state.load("digits") == {"traffic": {"sticky": "header:a"}}
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "are lost when it stops" in caplog.text
        assert "Set state_dir" in caplog.text


@pytest.mark.skipif(os.name == "nt", reason="file modes have no effect on Windows")
@pytest.mark.parametrize("name", ["", "models", "rollouts"])
def test_a_directory_writable_by_others_is_not_used(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateStore(tmp_path)
    state.save("digits", traffic={})
    close_state(state)
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name).chmod(0o777)
    reopened_store = StateStore(tmp_path)
    assert reopened_store.load("digits") == {}
    reopened_store.save("digits", number=1)
    close_state(reopened_store)
    assert json.loads((tmp_path / "models" / "digits.json").read_text()) == {"traffic": {}}
    assert f"{tmp_path / name} can be written by other users" in caplog.text
    assert "Set state_dir" in caplog.text


@pytest.mark.skipif(os.name == "nt", reason="file modes have no effect on Windows")
def test_the_state_is_private_under_any_umask(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        state = StateStore(tmp_path / "a" / "state")
        state.save("digits", traffic={})
        close_state(state)
    finally:
        os.umask(old_umask)
    paths = [path for path in (tmp_path / "a").rglob("*") if path.name != "lock"]
    assert {path.name: path.stat().st_mode & 0o777 for path in paths} == {
        "state": 0o700,
        "models": 0o700,
        "digits.json": 0o600,
    }


def test_a_symlink_at_a_state_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "victim").write_text("{}")
    (tmp_path / "models" / "digits.json").symlink_to(tmp_path / "victim")
    state = StateStore(tmp_path)
    state.save("digits", number=1)
    close_state(state)
    assert (tmp_path / "victim").read_text() == "{}"
    assert not (tmp_path / "models" / "digits.json").is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="file modes have no effect on Windows")
def test_a_model_store_writable_by_others_keeps_no_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").mkdir()
    config = make_settings(model_store=tmp_path / "store")
    assert state_directory(config, {"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "store" / ".tsx"
    (tmp_path / "store").chmod(0o777)
    directory = state_directory(config, {"XDG_STATE_HOME": str(tmp_path)})
    assert directory is not None
    assert directory.is_relative_to(tmp_path / "tsx")
    assert "are not saved in the model store" in caplog.text


def make_settings(**values: Any) -> Settings:
    return Settings.model_validate(values)


def test_the_first_writable_directory_keeps_the_state(tmp_path: Path) -> None:
    store, home = tmp_path / "store", {"XDG_STATE_HOME": str(tmp_path / "home")}
    store.mkdir()
    assert (
        state_directory(make_settings(state_dir=tmp_path / "own", model_store=store), home)
        == tmp_path / "own"
    )
    assert state_directory(make_settings(model_store=store), home) == store / ".tsx"
    assert (
        state_directory(make_settings(model_store=tmp_path / "not there"), home)
        == tmp_path / "home/tsx/127.0.0.1_8080"
    )
    assert (
        state_directory(make_settings(inference_address="unix:/run/tsx.sock"), home)
        == tmp_path / "home/tsx/run_tsx.sock"
    )
    assert state_directory(make_settings(inference_address="http://127.0.0.1:0"), home) is None
    (tmp_path / "file").write_text("")
    assert state_directory(make_settings(), {"XDG_STATE_HOME": str(tmp_path / "file")}) is None


def test_the_directory_for_state_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("store").mkdir()
    assert state_directory(make_settings(state_dir="own")) == tmp_path / "own"
    assert state_directory(make_settings(model_store="store")) == tmp_path / "store" / ".tsx"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to every directory")
def test_an_unwritable_model_store_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o500)
    assert (
        state_directory(
            make_settings(model_store=tmp_path / "store"), {"XDG_STATE_HOME": str(tmp_path)}
        )
        == tmp_path / "tsx/127.0.0.1_8080"
    )


@asynccontextmanager
async def a_registry_of_digits(store: Path, **models: Any) -> AsyncIterator[Registry]:
    """Run a registry with versions 1.0 and 2.0 of a model, without workers."""
    if not (store / "digits-1.0.mar").exists():
        for number in ("1.0", "2.0"):
            make_model(store / f"digits-{number}.mar", HANDLER, name="digits", version=number)
    async with a_registry(
        model_store=store, cache_dir=store / "cache", worker_preload=False, models=models
    ) as registry:
        for number in ("1.0", "2.0"):
            await registry.register(RegisterOrder(url=f"digits-{number}.mar", initial_workers=0))
        registry.traffic_manager.set_initial_default("digits", "1.0", explicit=False)
        yield registry


async def test_traffic_labels_default_and_undo_history_survive_a_restart(tmp_path: Path) -> None:
    first = Traffic(weights={"1.0": 1}, labels={"stable": "1.0"})
    second = Traffic(weights={"1.0": 1, "2.0": 1}, sticky="header:a")
    async with a_registry_of_digits(tmp_path) as registry:
        registry.set_traffic("digits", first)
        registry.set_default("digits", "2.0")
        registry.set_traffic("digits", second)
    async with a_registry_of_digits(tmp_path) as registry:
        assert registry.traffic("digits") == second
        assert registry.find("digits").version == "2.0"
        registry.traffic_manager.rollback("digits")
        assert registry.traffic("digits") == first
        assert registry.find("digits", "stable").version == "1.0"
    async with a_registry_of_digits(tmp_path) as registry:
        registry.traffic_manager.rollback("digits")
        assert (registry.traffic("digits"), registry.find("digits").version) == (first, "1.0")
        registry.traffic_manager.rollback("digits")
        assert registry.traffic("digits") == Traffic()
        with pytest.raises(Conflict, match="There is no change to undo"):
            registry.traffic_manager.rollback("digits")


async def test_without_a_change_nothing_is_saved_or_undoable(tmp_path: Path) -> None:
    async with a_registry_of_digits(tmp_path) as registry:
        with pytest.raises(Conflict, match="There is no change to undo"):
            registry.traffic_manager.rollback("digits")
    assert not (tmp_path / ".tsx").exists()


async def test_a_changed_configuration_overrides_the_saved_traffic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def read_traffic(first: int) -> Traffic:
        weights = {"1.0": first, "2.0": 100 - first}
        async with a_registry_of_digits(
            tmp_path, digits={"traffic": {"weights": weights}}
        ) as registry:
            return registry.traffic("digits")

    def share_between(first: int) -> Traffic:
        return parse_traffic({"weights": {"1.0": first, "2.0": 100 - first}})

    saved_traffic = Traffic(weights={"2.0": 1})
    assert await read_traffic(90) == share_between(90)
    config = {"traffic": {"weights": {"1.0": 90, "2.0": 10}}}
    async with a_registry_of_digits(tmp_path, digits=config) as registry:
        registry.set_traffic("digits", saved_traffic)
    assert await read_traffic(90) == saved_traffic
    assert caplog.text == ""
    assert await read_traffic(50) == share_between(50)
    assert "because the configuration has changed" in caplog.text
    # The overridden traffic is not restored later.
    assert await read_traffic(90) == share_between(90)


async def test_the_state_of_a_model_is_removed_with_its_last_version(tmp_path: Path) -> None:
    async with a_registry_of_digits(tmp_path) as registry:
        registry.set_traffic("digits", Traffic(weights={"2.0": 1}))
    async with a_registry_of_digits(tmp_path) as registry:
        await registry.unregister("digits", "2.0")
        assert registry.traffic("digits") != NOTHING
        await registry.unregister("digits")
    assert list((tmp_path / ".tsx" / "models").iterdir()) == []


def test_a_second_server_writes_after_the_first_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = StateStore(tmp_path)
    first.save("digits", traffic={"weights": {"1.0": 1}})
    asyncio.run(first.written())
    second = StateStore(tmp_path, replaces=True)
    assert second.load("digits") == {"traffic": {"weights": {"1.0": 1}}}
    # The first server ends soon, so nothing is reported.
    assert caplog.records == []
    second.save("digits", traffic={"weights": {"2.0": 1}})
    second.save("faces", traffic={})
    asyncio.run(second.written())
    assert StateStore(None).load("digits") == {}
    assert len(caplog.records) == caplog.text.count("another running server uses") == 1
    assert json.loads((tmp_path / "models" / "digits.json").read_text()) == {
        "traffic": {"weights": {"1.0": 1}}
    }
    close_state(first)
    second.save("faces", digest="a")
    close_state(second)
    third = StateStore(tmp_path)
    assert third.load("digits") == {"traffic": {"weights": {"2.0": 1}}}
    assert third.load("faces") == {"traffic": {}, "digest": "a"}
    third.close()
