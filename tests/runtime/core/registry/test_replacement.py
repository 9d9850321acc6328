"""Versions that replace others, with real workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kit.jobs import TIMEOUT, a_waiting_job, answer_of
from tests.support.clients.talker import (
    HANDLER,
    a_registry,
    ask,
    cancel,
    gone,
    order,
    register,
    submit,
    talker,
    until,
)
from tests.support.models import STATEFUL
from tsx_runtime import wire
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import Conflict, LoadFailed, ModelVersionNotFound, TsxError
from tsx_runtime.settings.schema import ModelSettings
from tsx_runtime.settings.traffic_policy import parse_traffic

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("processes")]

SEQUENCES = "sequenceBatching: true\nsequenceMaxIdleMSec: {idle}\nmaxNumSequence: 10\nmaxSequenceJobQueueSize: 10\n"
WAIT_FOR_GATE = "import time\nfrom pathlib import Path\nPath('began').touch()\nwhile not Path('go').exists():\n    time.sleep(0.005)\n"


def a_handler(text: str) -> str:
    """Return a handler that gives this answer to every request."""
    return f"def handle(data, context):\n    return [{text!r}] * len(data or [])\n"


def replacement_order(**values) -> RegisterOrder:
    return RegisterOrder(url="talker", replaces=True, **values)


async def replace(
    registry: Registry,
    directory: Path,
    handler: str = HANDLER,
    *,
    config: str = "",
    version: str = "1.0",
    **values: Any,
) -> ModelVersion:
    """Register a model that replaces the current one; `values` are registration options."""
    path = talker(directory, handler, config=config, version=version)
    return await registry.register_path(path, replacement_order(**values))


async def test_a_replacement_without_a_predecessor_is_registered(registry, tmp_path):
    version = await replace(registry, tmp_path / "1", initial_workers=1)
    assert version.replaced_version is None
    assert await ask(registry.find("talker"), "x") == "x"


async def test_a_replaced_version_still_answers_its_accepted_requests(registry, tmp_path):
    old_version = await register(registry, tmp_path / "1", initial_workers=2)
    pids = [worker.pid for worker in old_version.workers]
    running_job = submit(old_version, f"until {tmp_path / 'go'}")
    new_version = await replace(registry, tmp_path / "2", a_handler("new"))
    assert registry.find("talker") is registry.find("talker", "1.0") is new_version
    assert (new_version.replaced_version, new_version.min_workers, len(new_version.workers)) == (
        "1.0",
        2,
        2,
    )
    assert await ask(new_version, "x") == "new"
    assert await ask(old_version, "x") == "new"
    assert not running_job.done.done()
    (tmp_path / "go").touch()
    assert (await answer_of(running_job)).status == 200
    await until(lambda: all(map(gone, pids)) and not registry.resources.background)
    assert await ask(old_version, "x") == "new"
    with pytest.raises(Conflict):
        await registry.register_path(tmp_path / "2", order())
    await registry.unregister("talker")
    await registry.register_path(tmp_path / "2", order())


async def test_a_replacement_that_fails_to_load_changes_nothing(registry, tmp_path):
    old_version = await register(registry, tmp_path / "1")
    broken_model = talker(tmp_path / "2", "import nothing_of_that_name\n")
    with pytest.raises(LoadFailed, match="nothing_of_that_name"):
        await registry.register_path(broken_model, replacement_order())
    assert "nothing_of_that_name" in old_version.last_error
    assert registry.find("talker") is old_version
    assert await ask(old_version, "x") == "x"
    await registry.register_path(broken_model, replacement_order(), wait=False)
    await until(lambda: not registry.resources.background)
    assert await ask(registry.find("talker"), "x") == "x"
    await replace(registry, tmp_path / "3", a_handler("new"))
    assert await ask(registry.find("talker"), "x") == "new"


async def test_a_replacement_is_warmed_up_before_it_takes_over(registry, tmp_path):
    notes = tmp_path / "notes"
    handler = f"def handle(data, context):\n    print(len(data or []), file=open({str(notes)!r}, 'a'))\n    return ['new'] * len(data or [])\n"
    failing_handler = (
        "def handle(data, context):\n    if data:\n        raise ValueError('too cold')\n"
    )

    old_version = await register(registry, tmp_path / "1")
    cold_model = talker(
        tmp_path / "2",
        failing_handler,
        config="warmup: [{file: handler.py, strict: true}]",
    )
    with pytest.raises(LoadFailed, match=r"warm-up .* handler\.py was answered with 500"):
        await registry.register_path(cold_model, replacement_order())
    assert registry.find("talker") is old_version
    config = "warmup: [{file: handler.py, count: 8}, gone.txt]\nbatchSize: 4\n"
    new_version = await replace(registry, tmp_path / "3", handler, config=config)
    assert new_version.archive.problems == ["warmup: gone.txt is not in the archive"]
    # The first call loads the model.
    assert notes.read_text().split() == ["0", "4", "4"]


async def test_a_new_version_number_inherits_default_traffic_and_labels(registry, tmp_path):
    await register(registry, tmp_path / "1")
    await register(registry, tmp_path / "2", version="2.0")
    traffic = {
        "weights": {"1.0": 90, "2.0": 10},
        "labels": {"stable": "1.0"},
        "rules": [{"header": "X", "equals": "1", "to": "1.0"}],
    }
    registry.set_traffic("talker", parse_traffic({}))
    registry.set_traffic("talker", parse_traffic(traffic))
    new_version = await replace(registry, tmp_path / "3", version="3.0")
    assert registry.find("talker") is registry.find("talker", "stable") is new_version
    assert [*registry.models["talker"].versions] == ["3.0", "2.0"]
    assert registry.shares("talker") == {"3.0": 0.9, "2.0": 0.1}
    assert registry.traffic("talker").rules[0].to == "3.0"
    with pytest.raises(ModelVersionNotFound):
        registry.find("talker", "1.0")
    registry.traffic_manager.rollback("talker")
    assert registry.shares("talker") == {"3.0": 1.0}
    replacement = await replace(registry, tmp_path / "4", a_handler("new"), version="2.0")
    assert registry.find("talker", "2.0") is replacement
    assert registry.find("talker") is new_version
    await until(lambda: not registry.resources.background)
    await registry.register_path(tmp_path / "1", order())


async def test_a_replacement_keeps_limits_and_workers_set_at_run_time(registry, tmp_path):
    await register(registry, tmp_path / "1", job_queue_size=7, batch_size=3)
    registry.change("talker", None, {"batch_size": 5, "client_timeout": 900})
    await registry.scale("talker", None, 2)
    waiting_model = talker(
        tmp_path / "2",
        WAIT_FOR_GATE + a_handler("new"),
        config="batchSize: 9\nminWorkers: 1\n",
    )
    replacing = asyncio.create_task(
        registry.register_path(waiting_model, replacement_order(batch_size=4))
    )
    await until((waiting_model / "began").exists)
    # The new version is still loading.
    registry.change("talker", None, {"client_timeout": 800})
    await registry.scale("talker", None, 1)
    (waiting_model / "go").touch()
    new_version = await asyncio.wait_for(replacing, TIMEOUT)
    plan = new_version.plan
    assert (plan.batch_size, plan.job_queue_size, plan.client_timeout) == (4, 7, 800)
    await until(lambda: len(new_version.workers) == 1)
    third = await replace(registry, tmp_path / "3", a_handler("3"))
    assert (third.plan.batch_size, third.plan.job_queue_size, third.plan.client_timeout) == (
        4,
        7,
        800,
    )


async def test_a_replacement_with_an_slo_drops_batch_settings(registry, tmp_path):
    await register(registry, tmp_path / "1")
    waiting_model = talker(tmp_path / "2", WAIT_FOR_GATE + a_handler("new"))
    replacing = asyncio.create_task(
        registry.register_path(waiting_model, replacement_order(slo="p99<60s"))
    )
    await until((waiting_model / "began").exists)
    # The new version is still loading.
    registry.change("talker", None, {"batch_size": 5, "client_timeout": 800})
    (waiting_model / "go").touch()
    new_version = await asyncio.wait_for(replacing, TIMEOUT)
    assert (new_version.plan.slo, new_version.plan.client_timeout) == ("p99<60s", 800)
    assert "batch_size" not in new_version.changed_limits


async def test_the_archive_sets_only_limits_that_are_not_set_elsewhere(tmp_path):
    async with a_registry(models={"talker": ModelSettings(response_timeout=77)}) as registry:
        first = await replace(
            registry, tmp_path / "1", a_handler("1"), config="minWorkers: 1\nbatchSize: 2\n"
        )
        assert (first.min_workers, first.batch_size, first.plan.response_timeout) == (1, 2, 77)
        second = await replace(
            registry, tmp_path / "2", a_handler("2"), config="minWorkers: 2\nbatchSize: 4\n"
        )
        assert (second.min_workers, second.batch_size, second.plan.response_timeout) == (2, 4, 77)
        # A number that is inherited is not a client's.
        inherited = await replace(registry, tmp_path / "3", a_handler("3"))
        last = await replace(registry, tmp_path / "4", a_handler("4"), config="minWorkers: 1\n")
        assert (inherited.min_workers, last.min_workers) == (2, 1)


async def test_a_concurrent_replacement_is_refused(registry, tmp_path):
    old_version = await register(registry, tmp_path / "1")
    waiting_model = talker(tmp_path / "2", WAIT_FOR_GATE + a_handler("new"))
    replacing = asyncio.create_task(registry.register_path(waiting_model, replacement_order()))
    await until((waiting_model / "began").exists)
    with pytest.raises(Conflict, match="is already being replaced"):
        await registry.register_path(tmp_path / "1", replacement_order())
    assert await ask(old_version, "x") == "x"
    await cancel(replacing)
    assert await ask(registry.find("talker"), "x") == "x"
    second_attempt = asyncio.create_task(registry.register_path(waiting_model, replacement_order()))
    await until(lambda: registry._table._loading_replacements)
    await registry.unregister("talker")
    (waiting_model / "go").touch()
    with pytest.raises(Conflict, match="was unregistered while"):
        await second_attempt
    assert not registry.models
    await registry.register_path(tmp_path / "1", replacement_order(initial_workers=1))


async def test_a_replacement_continues_the_counters(registry, tmp_path):
    old_version = await register(registry, tmp_path / "1")
    await ask(old_version, "x")
    new_version = await replace(registry, tmp_path / "2")
    await ask(new_version, "x")
    assert new_version.stats.requests == 2


async def add_to_sequence(version: ModelVersion, id: str, text: str) -> int | str:
    """Return the total of a sequence, or the error that refuses its request."""
    meta = wire.request_meta("r", b"", [(b"ts_request_sequence_id", id.encode())])
    job = a_waiting_job(text.encode(), meta=meta)
    version.submit(job)
    try:
        answer = await answer_of(job)
    except TsxError as error:
        return error.message
    assert answer.status == 200
    return int(answer.body.split(b'"total": ')[1].split(b",")[0])


SUMS = STATEFUL.replace("totals.get(id, 0)", "totals.get(id, {start})")
assert SUMS != STATEFUL


def write_summing_model(directory: Path, start: int, idle_ms: int = 60_000) -> Path:
    """Write a model whose totals start at `start`, which identifies its version."""
    return talker(
        directory, SUMS.replace("{start}", str(start)), config=SEQUENCES.format(idle=idle_ms)
    )


async def test_sequences_stay_with_the_replaced_version_until_they_end(registry, tmp_path):
    first = await registry.register_path(write_summing_model(tmp_path / "1", 0), order())
    assert await add_to_sequence(first, "a", "1") == 1
    second = await registry.register_path(
        write_summing_model(tmp_path / "2", 1000), replacement_order()
    )
    assert await add_to_sequence(second, "a", "1") == 2
    assert await add_to_sequence(second, "b", "1") == 1001
    second.change({"job_queue_size": 50, "response_timeout": 0})
    second.change({"response_timeout": 60})
    third = await registry.register_path(
        write_summing_model(tmp_path / "3", 2000), replacement_order()
    )
    assert [await add_to_sequence(third, id, "1") for id in "abc"] == [3, 1002, 2001]
    assert await add_to_sequence(first, "a", "1") == 4
    assert await add_to_sequence(third, "a", "close") == 4
    await until(lambda: not first.workers)
    assert await add_to_sequence(third, "a", "1") == 2001
    assert await add_to_sequence(third, "b", "close") == 1002
    await until(lambda: not registry.resources.background)
    assert await add_to_sequence(third, "c", "1") == 2002


async def test_a_change_of_limits_keeps_sequences_with_the_replaced_version(registry, tmp_path):
    first = await registry.register_path(write_summing_model(tmp_path / "1", 0), order())
    assert await add_to_sequence(first, "a", "1") == 1
    second = await registry.register_path(
        write_summing_model(tmp_path / "2", 1000), replacement_order()
    )
    registry.change("talker", None, {"response_timeout": 100})
    assert await add_to_sequence(second, "a", "1") == 2
    registry.change("talker", None, {"response_timeout": 0})
    assert await add_to_sequence(second, "a", "close") == 2
    await until(lambda: not first.workers)
    assert "responseTimeout" in str(await add_to_sequence(second, "b", "1"))
    registry.change("talker", None, {"response_timeout": 100})
    assert await add_to_sequence(second, "b", "1") == 1001


async def test_a_stop_does_not_wait_for_sequences_of_replaced_versions(tmp_path):
    async with a_registry(unregister_model_timeout=10_000) as registry:
        first = await registry.register_path(write_summing_model(tmp_path / "1", 0), order())
        assert await add_to_sequence(first, "a", "1") == 1
        await registry.register_path(write_summing_model(tmp_path / "2", 1000), replacement_order())
        await asyncio.wait_for(registry.close(), TIMEOUT)
        assert not first.workers


@pytest.mark.parametrize(
    ("settings", "idle_ms", "reason"),
    [({"unregister_model_timeout": 1}, 60_000, "is over"), ({}, 200, "has expired")],
)
async def test_sequences_of_a_replaced_version_end_by_a_timeout(
    tmp_path, settings, idle_ms, reason
):
    async with a_registry(**settings) as registry:
        first = await registry.register_path(
            write_summing_model(tmp_path / "1", 0, idle_ms), order()
        )
        assert await add_to_sequence(first, "a", "1") == 1
        second = await registry.register_path(
            write_summing_model(tmp_path / "2", 1000), replacement_order()
        )
        await until(lambda: not first.workers)
        assert reason in str(await add_to_sequence(second, "a", "1"))
        assert await add_to_sequence(second, "a", "1") == 1001
