"""Control groups that bound workers: their files, their parents, and real groups where possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.talker import a_registry, ask, gone, order
from tests.support.models import make_model
from tsx_runtime.core.isolation import cgroups
from tsx_runtime.core.isolation.config import Isolation, Sandbox, missing_features
from tsx_runtime.errors import OutOfResources

pytestmark = pytest.mark.anyio

BOUNDED = {"isolation_memory": 200, "isolation_processes": 60}
NO_BOUNDS = "; ".join(missing_features(Isolation(memory=200, processes=60)))
bounded = pytest.mark.skipif(
    bool(NO_BOUNDS), reason=f"this system cannot bound workers: {NO_BOUNDS}"
)


def test_a_bound_is_written_as_the_kernel_reads_it():
    assert cgroups.limit_files(memory=512, cpus=1.5, processes=64) == {
        "cpu.max": "150000 100000",
        "memory.max": str(512 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "64",
    }
    assert cgroups.limit_files(memory=0, cpus=0, processes=0) == {}


@pytest.mark.parametrize(
    ("mounts", "membership", "expected"),
    [
        (
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "0::/system.slice/tsx.service\n",
            "/sys/fs/cgroup/system.slice/tsx.service",
        ),
        (
            "33 32 0:29 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n",
            "4:memory:/docker/1\n0::/\n",
            "/sys/fs/cgroup/unified",
        ),
        ("33 32 0:29 / /sys/fs/cgroup/memory rw - cgroup none rw\n", "4:memory:/docker/1\n", None),
    ],
)
def test_the_own_group_is_where_cgroup_v2_is_mounted(mounts, membership, expected, tmp_path):
    (tmp_path / "mounts").write_text(mounts)
    (tmp_path / "membership").write_text(membership)
    group = cgroups.current_group(tmp_path / "mounts", tmp_path / "membership")
    assert group == (None if expected is None else Path(expected))


@pytest.fixture
def group(tmp_path, monkeypatch) -> Path:
    """Write the files of a group that this process seems to be in."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.type").write_text("domain\n")
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    monkeypatch.setattr(cgroups, "current_group", lambda: tmp_path)
    return tmp_path


def test_a_server_moves_itself_before_it_makes_groups_in_its_own(group):
    assert cgroups.prepare(None, {"memory.max": "1", "pids.max": "2"}) == group
    assert (group / cgroups.SERVER_GROUP / "cgroup.procs").read_text() == str(os.getpid())
    assert (group / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_once_moved_it_makes_groups_beside_its_own(group, monkeypatch):
    cgroups.prepare(None, {"memory.max": "1"})
    (group / "cgroup.procs").write_text("")
    monkeypatch.setattr(cgroups, "current_group", lambda: group / cgroups.SERVER_GROUP)
    assert cgroups.prepare(None, {"memory.max": "1"}) == group


def test_a_group_that_the_administrator_names_is_taken_as_it_is(group):
    assert cgroups.prepare(group, {"memory.max": "1"}) == group
    assert not (group / cgroups.SERVER_GROUP).exists()


def test_a_group_with_processes_of_others_is_left_alone(group):
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n")
    with pytest.raises(
        cgroups.CgroupsUnavailable,
        match=rf"processes .* \({os.getppid()}\).*Delegate=yes",
    ):
        cgroups.prepare(None, {"memory.max": "1"})


def test_a_group_without_the_controller_is_no_use(group):
    (group / "cgroup.controllers").write_text("hugetlb\n")
    with pytest.raises(cgroups.CgroupsUnavailable, match="no controller cpu or memory"):
        cgroups.prepare(group, {"memory.max": "1", "cpu.max": "1"})


@pytest.fixture
def real() -> Iterator[Path]:
    parent = cgroups.current_group()
    if parent is None:
        pytest.skip("cgroup v2 is not mounted here")
    directory = parent / f"tsx-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made in {parent}: {error.strerror}")
    yield directory
    directory.rmdir()


@pytest.mark.usefixtures("processes")
def test_a_process_joins_its_group_before_it_is_restricted_and_is_ended_with_it(real, tmp_path):
    group = cgroups.Group(real, {"cgroup.max.depth": "0"})
    sandbox = Sandbox(Isolation(), [], gpu=False, output="", label="")
    sandbox.create()
    sandbox._group = group
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    command = sandbox.command([sys.executable, "-c", code])
    assert json.loads(command[-1])["group"] == str(group.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert set((group.path / "cgroup.procs").read_text().split()) == {
            str(process.pid),
            str(child),
        }
        sandbox.remove()
        assert process.wait() < 0
    assert gone(child)
    assert not group.path.exists()


HANDLER = """
import subprocess

def handle(data, context):
    if data is None:
        return None
    if data[0]["body"] == b"eat":
        return [len(bytearray(1 << 30))]
    started = []
    try:
        while len(started) < 500:
            started.append(subprocess.Popen(["sleep", "600"]))
    except OSError:
        pass
    for process in started:
        process.kill()
    return [str(len(started))]
"""


@bounded
async def test_a_worker_that_takes_more_memory_than_it_may_is_killed_alone(tmp_path, caplog):
    async with a_registry(
        worker_preload=False, isolation="on", cache_dir=tmp_path / "cache", **BOUNDED
    ) as registry:
        version = await registry.register_path(make_model(tmp_path / "m.mar", HANDLER), order())
        with pytest.raises(OutOfResources):
            await ask(version, "eat")
        assert int(await ask(version, "fork")) < 60
        assert "isolation_memory, 200 MB" in caplog.text
