"""The server and the load generator on separate cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.support.clients.scripted import OK, scripted
from tsx_cli.bench.load.generator import measure
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import PinnedCores
from tsx_cli.bench.search import server as pinning
from tsx_cli.bench.search.server import choose_cores, pinned
from tsx_cli.common.failure import UsageError
from tsx_runtime.shared.cores import cpu_count

linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"),
    reason="this system does not let a process choose its cores",
)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)


@pytest.mark.usefixtures("four_cores")
def test_a_side_without_given_cores_gets_the_remaining_ones() -> None:
    assert choose_cores(None, None) is None
    assert choose_cores("0-1", "3") == PinnedCores(server=[0, 1], generator=[3])
    assert choose_cores("0-2", None) == PinnedCores(server=[0, 1, 2], generator=[3])
    assert choose_cores(None, "2,0") == PinnedCores(server=[1, 3], generator=[0, 2])
    assert choose_cores(None, "2", running=True) == PinnedCores(server=[], generator=[2])


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("server", "generator", "message"),
    [
        (
            "0-4",
            None,
            "--server-cores: core 4 is not one of those that this process may use: 0, 1, 2, 3",
        ),
        (None, "x", "--generator-cores: 'x' is neither a core nor a range"),
        ("", None, "--server-cores: it names no core"),
        ("3-1", None, "--server-cores: it names no core"),
        ("0-3", None, "--server-cores: 0-3 are all cores, and none is left for the other side"),
        ("0-1", "1-2", "--server-cores and --generator-cores both have core 1"),
    ],
)
def test_unavailable_cores_are_refused(
    server: str | None, generator: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message.replace("(", "\\(")):
        choose_cores(server, generator)


def test_an_error_is_reported_if_the_system_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert pinning.choose_cores(None, None) is None
    with pytest.raises(
        UsageError, match="--server-cores: this system does not let a process choose its cores"
    ):
        choose_cores("0", None)


@pytest.mark.usefixtures("processes")
@linux
def test_child_processes_inherit_the_cores_and_their_count() -> None:
    cores_before = os.sched_getaffinity(0)
    core = min(cores_before)
    with pinned([core]):
        output = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert (output.stdout.strip(), cpu_count()) == (f"{{{core}}}", 1)
    assert os.sched_getaffinity(0) == cores_before
    with pinned([]):
        assert os.sched_getaffinity(0) == cores_before


@pytest.mark.usefixtures("processes")
@linux
def test_the_generator_runs_on_its_own_cores() -> None:
    core = max(os.sched_getaffinity(0))
    start, observed_cores = time.time(), list[list[int]]()

    # A fork server, not this process, may be the parent of the generator.
    def observe(_: object) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.create_time() >= start - 1:
                    observed_cores.append(process.cpu_affinity())

    with scripted(lambda number, _: [OK]) as url:
        measure(
            LoadPlan(url, "m", (Payload(b"x"),), seconds=0.6, warm_up=0.0, cores=(core,)),
            on_progress=observe,
        )
    assert [core] in observed_cores
