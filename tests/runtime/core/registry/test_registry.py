"""The registry with real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import psutil
import pytest

from tests.kit.jobs import TIMEOUT, answer_of, refusal_of
from tests.support.clients.talker import (
    a_registry,
    a_talker,
    cancel,
    gone,
    order,
    register,
    submit,
    talker,
    until,
)
from tests.support.models import make_model
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.errors import (
    BadRequest,
    Conflict,
    LoadFailed,
    ModelNotFound,
    Unavailable,
    WorkerDied,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("processes")]


async def test_unregistering_refuses_new_requests_at_once(registry, tmp_path):
    version = await a_talker(registry, tmp_path)
    gate = tmp_path / "go"
    accepted = [submit(version, f"until {gate}") for _ in range(3)]
    unregistration = asyncio.create_task(registry.unregister("talker"))
    await asyncio.sleep(0)
    # New requests would keep the model busy forever; therefore they are refused.
    with pytest.raises(ModelNotFound):
        registry.find("talker")
    with pytest.raises(Conflict):
        await registry.register_path(tmp_path / "m", order())
    gate.touch()
    await asyncio.wait_for(unregistration, TIMEOUT)
    assert [job.done.result().status for job in accepted] == [200] * 3
    await registry.register_path(tmp_path / "m", order())


async def test_unregistering_continues_after_its_client_leaves(registry, tmp_path, monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.workers.instance.EXIT_GRACE_S", 0.5)

    version = await a_talker(registry, tmp_path)
    pid = version.workers[0].pid
    # A stopped process ends only after the grace period.
    os.kill(pid, signal.SIGSTOP)
    unregistration = asyncio.create_task(registry.unregister("talker"))
    await until(lambda: not version.workers)
    await cancel(unregistration)
    await until(lambda: gone(pid) and not registry.resources.background)
    await registry.register_path(tmp_path / "m", order())


async def test_a_load_is_cancelled_when_its_client_leaves(registry, tmp_path):
    hanging_handler = (
        "import time\nfrom pathlib import Path\nPath('began').touch()\ntime.sleep(600)\n"
    )

    registration = asyncio.create_task(register(registry, tmp_path / "m", hanging_handler))
    await until((tmp_path / "m" / "began").exists)
    pid = registry.find("talker").workers[0].pid
    await cancel(registration)
    await until(lambda: gone(pid) and not registry.resources.background)
    assert not registry.models


async def test_the_download_of_a_client_that_left_is_removed(registry, tmp_path, monkeypatch):
    file = tmp_path / "m.mar"
    download_started, may_continue, download_finished = (
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    def fetch(*arguments, **options):
        download_started.set()
        assert may_continue.wait(TIMEOUT)
        file.touch()
        download_finished.set()
        return file

    monkeypatch.setattr(registry.downloads._fetcher, "local_file", lambda *arguments: None)
    monkeypatch.setattr(registry.downloads._fetcher, "fetch", fetch)
    registration = asyncio.create_task(
        registry.register(RegisterOrder(url="https://models.example/m.mar"))
    )
    await until(download_started.is_set)
    await cancel(registration)
    may_continue.set()
    await until(lambda: download_finished.is_set() and not file.exists())


async def test_scaling_down_completes_after_its_client_leaves(registry, tmp_path):
    version = await a_talker(registry, tmp_path)
    pid, gate = version.workers[0].pid, tmp_path / "go"
    job = submit(version, f"until {gate}")
    await until(lambda: version.workers[0].channel.batches)
    scaling = asyncio.create_task(registry.scale("talker", None, 0))
    await asyncio.sleep(0)
    assert not version.workers
    await cancel(scaling)
    gate.touch()
    assert (await answer_of(job)).status == 200
    await until(lambda: gone(pid))


async def test_closing_ends_a_model_that_is_being_unregistered(registry, tmp_path):
    version = await a_talker(registry, tmp_path)
    job = submit(version, "hang")
    await until(lambda: version.workers[0].channel.batches)
    pid = version.workers[0].pid
    unregistration = asyncio.create_task(registry.unregister("talker"))
    await asyncio.sleep(0)
    await registry.close()
    await asyncio.wait_for(unregistration, TIMEOUT)
    await refusal_of(job, WorkerDied)
    assert not psutil.pid_exists(pid)


async def test_closing_answers_accepted_requests_within_the_drain_time(tmp_path):
    async with a_registry() as registry:
        version = await a_talker(registry, tmp_path)
        accepted_job = submit(version, "slow")
        await registry.close(drain=TIMEOUT)
        assert (await accepted_job.done).body == b"slow"
    async with a_registry() as registry:
        version = await a_talker(registry, tmp_path, initial_workers=2)
        hanging_jobs = [submit(version, "hang") for _ in range(2)]
        late_job = submit(version, "late")
        await until(lambda: all(worker.channel.batches for worker in version.workers))
        await registry.close(drain=0.05)
        await refusal_of(late_job, Unavailable, "stopping")
        for job in hanging_jobs:
            await refusal_of(job, WorkerDied)


async def test_names_with_path_characters_are_refused(registry, tmp_path):
    path = talker(tmp_path / "m")
    for invalid_options in ({"model_name": "../x"}, {"version": "1/2"}, {"model_name": "a b"}):
        with pytest.raises(BadRequest, match="cannot be used"):
            await registry.register_path(path, order(**invalid_options))


@pytest.mark.parametrize("file", ["r.txt", ""])
async def test_a_missing_module_names_the_setting_that_installs_requirements(
    registry, tmp_path, file
):
    directory = make_model(
        tmp_path / "own", "import not_there", **({"requirementsFile": file} if file else {})
    )
    (directory / "r.txt").write_text("not-there")

    with pytest.raises(LoadFailed) as exc_info:
        await registry.register_path(directory, order())
    assert ("--set install_py_dep_per_model=true" in exc_info.value.message) is bool(file)


async def test_an_excessive_worker_count_starts_none(tmp_path):
    async with a_registry(cpus=2) as registry:
        with pytest.raises(BadRequest, match="500 workers are too many"):
            await a_talker(registry, tmp_path, initial_workers=500)
        assert not registry.models
        version = await registry.register_path(tmp_path / "m", order(initial_workers=0))
        with pytest.raises(BadRequest, match=r"max_workers = 500 in \[models\.talker\]"):
            await registry.scale("talker", None, 500)
        assert (version.workers, version.min_workers) == ([], 0)


@pytest.mark.parametrize("source", ["archive", "models", "model_versions"])
async def test_max_workers_of_the_model_allows_more_workers(tmp_path, source):
    config = {"config": "maxWorkers: 70\n"} if source == "archive" else {}
    settings = {
        "models": {"models": {"talker": {"max_workers": 70}}},
        "model_versions": {"model_versions": {"talker": {"1.0": {"maxWorkers": 70}}}},
    }

    async with a_registry(cpus=2, **settings.get(source, {})) as registry:
        version = await registry.register_path(
            talker(tmp_path / "m", **config), order(initial_workers=0)
        )
        version._check_workers(70)
        with pytest.raises(BadRequest, match="71 workers are too many"):
            version._check_workers(71)
