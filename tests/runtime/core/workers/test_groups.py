"""Workers of two processes under torchrun, on the CPU with gloo."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import psutil
import pytest

from tests.kit.jobs import refusal_of
from tests.support import forked
from tests.support.clients.talker import (
    a_registry,
    a_talker,
    ask,
    gone,
    order,
    submit,
    talker,
    until,
)
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import LoadFailed, OutOfResources

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        sys.platform == "win32", reason="torchrun workers need sockets that are inherited"
    ),
]

HANDLER = """
import datetime, json, os
import torch
import torch.distributed as dist

class Handler:
    def initialize(self, context):
        self.rank = int(os.environ["LOCAL_RANK"])
        if FAILS and self.rank == 1:
            raise RuntimeError("no weights for this rank")
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        pids = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self.info = {"pids": pids, "gpu": context.system_properties["gpu_id"]}
        self.info |= {"threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"]}

    def handle(self, data, context):
        words = [row["body"].decode() for row in data]
        Path(f"called-{self.rank}").touch()
        if "boom" in words:
            raise ValueError("boom")
        if not PIPELINE:
            total = torch.tensor([float(self.rank + 1)])
            dist.all_reduce(total)
            self.info["sum"] = total.item()
        return ["x" * 2_000_000 if word == "big" else json.dumps(self.info) for word in words]
"""
TENSOR = "parallelType: tp\ntorchrun:\n  nproc-per-node: 2\n  OMP_NUMBER_THREADS: 1\n"


@pytest.fixture(autouse=True)
def forked_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork torchrun's processes from one that has already imported torch."""
    monkeypatch.setattr("tsx_runtime.core.workers.subprocesses.subprocess", forked.SUBPROCESS)


def a_handler(*, fails_to_load: bool = False, pipeline: bool = False) -> str:
    return f"from pathlib import Path\nFAILS, PIPELINE = {fails_to_load}, {pipeline}\n{HANDLER}"


async def ask_ranks(version) -> dict:
    return json.loads(await ask(version, ""))


async def test_all_ranks_run_each_batch_and_any_death_restarts_the_group(registry, tmp_path):
    directory = talker(tmp_path / "m", a_handler(), config=TENSOR)

    version = await registry.register_path(directory, order(batch_size=4))
    first = await ask_ranks(version)
    assert (first["sum"], first["gpu"], first["threads"], first["omp"]) == (3.0, None, 1, "1")
    assert len(set(first["pids"])) == 2
    answers = await asyncio.gather(*(submit(version, "").done for _ in range(5)))
    assert {answer.status for answer in answers} == {200}
    # Large answers of the other rank must not fill a buffer.
    for _ in range(3):
        assert len(await ask(version, "big")) == 2_000_000
    failed_answer = await submit(version, "boom").done
    assert failed_answer.status == 500
    # The ranks still run the same batches.
    assert (await ask_ranks(version))["pids"] == first["pids"]
    [worker] = version.workers
    assert worker.memory() > sum(psutil.Process(pid).memory_info().rss for pid in first["pids"])

    # The batch is under way when the rank dies.
    os.kill(first["pids"][1], signal.SIGSTOP)
    lost_job = submit(version, "")
    await until(lambda: worker.channel.batches)
    os.kill(first["pids"][1], signal.SIGKILL)
    await refusal_of(lost_job, OutOfResources)
    await until(lambda: worker.restarts == 1 and worker.state is WorkerState.READY)
    second = await ask_ranks(version)
    assert not set(second["pids"]) & set(first["pids"])
    await until(lambda: not [pid for pid in first["pids"] if not gone(pid)])
    assert "exit code 137" in version.last_error

    await registry.unregister("talker")
    await until(lambda: not [pid for pid in second["pids"] if not gone(pid)])


async def test_a_single_machine_group_listens_only_on_loopback(registry, tmp_path):
    """Check this, since torch's stores need no password and its rendezvous unpickles input."""
    directory = talker(
        tmp_path / "m",
        a_handler(),
        config=f"{TENSOR}  rdzv-backend: c10d\n  rdzv-endpoint: 0.0.0.0:0\n",
    )

    version = await registry.register_path(directory, order())
    agent = psutil.Process((await ask_ranks(version))["pids"][0]).parent()
    sockets = [
        connection
        for process in (agent, *agent.children())
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert sockets
    assert {connection.laddr.ip for connection in sockets} == {"127.0.0.1"}


@pytest.mark.parametrize("mode", ["", "continuousBatching: true\n"])
async def test_a_killed_pipeline_group_leaves_no_process(registry, tmp_path, mode):
    directory = talker(
        tmp_path / "m",
        a_handler(pipeline=True),
        config=f"parallelType: pp\nparallelLevel: 2\n{mode}",
    )

    version = await registry.register_path(directory, order())
    pids = (await ask_ranks(version))["pids"]
    assert sorted(path.name for path in directory.glob("called-*")) == ["called-0"]
    version.workers[0].kill("the test wants it")
    await until(lambda: not [pid for pid in pids if not gone(pid)])


async def test_a_rank_that_fails_to_load_is_reported_with_its_reason(registry, tmp_path):
    directory = talker(tmp_path / "m", a_handler(fails_to_load=True), config=TENSOR)

    with pytest.raises(LoadFailed, match=r"rank 1: .*no weights for this rank"):
        await registry.register_path(directory, order())


@pytest.mark.usefixtures("processes")
async def test_slo_models_account_for_all_gpus_of_a_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    async with a_registry() as registry:
        config = "parallelType: custom\nparallelLevel: 2\n"
        version = await a_talker(registry, tmp_path, config=config)
        assert [worker.channel.devices for worker in version.workers] == [(0, 1)]
