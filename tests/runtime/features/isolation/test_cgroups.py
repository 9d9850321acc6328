"""Cgroups that limit workers: their files, their parents, and real cgroups where possible."""

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
from tsx_runtime.errors import OutOfResources
from tsx_runtime.features.isolation import cgroups
from tsx_runtime.features.isolation.config import Isolation, KernelSandbox, missing_features

pytestmark = pytest.mark.anyio

LIMITS = {"isolation_memory": 200, "isolation_processes": 60}
MISSING_LIMITS = "; ".join(missing_features(Isolation(memory=200, processes=60)))
needs_cgroups = pytest.mark.skipif(
    bool(MISSING_LIMITS), reason=f"this system cannot bound workers: {MISSING_LIMITS}"
)


def test_limits_are_written_in_the_kernels_format():
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
def test_the_servers_own_group_is_found_at_the_cgroup_v2_mount(
    mounts, membership, expected, tmp_path
):
    (tmp_path / "mounts").write_text(mounts)
    (tmp_path / "membership").write_text(membership)
    group = cgroups.current_group(tmp_path / "mounts", tmp_path / "membership")
    assert group == (None if expected is None else Path(expected))


@pytest.fixture
def group(tmp_path, monkeypatch) -> Path:
    """Write the files of a fake cgroup that contains this process."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.type").write_text("domain\n")
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    monkeypatch.setattr(cgroups, "current_group", lambda: tmp_path)
    return tmp_path


def test_the_server_moves_into_a_subgroup_before_it_creates_groups(group):
    assert cgroups.prepare(None, {"memory.max": "1", "pids.max": "2"}) == group
    assert (group / cgroups.SERVER_GROUP / "cgroup.procs").read_text() == str(os.getpid())
    assert (group / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_moved_server_creates_groups_next_to_its_own(group, monkeypatch):
    cgroups.prepare(None, {"memory.max": "1"})
    (group / "cgroup.procs").write_text("")
    monkeypatch.setattr(cgroups, "current_group", lambda: group / cgroups.SERVER_GROUP)
    assert cgroups.prepare(None, {"memory.max": "1"}) == group


def test_a_configured_group_is_used_unchanged(group):
    assert cgroups.prepare(group, {"memory.max": "1"}) == group
    assert not (group / cgroups.SERVER_GROUP).exists()


def test_a_group_with_foreign_processes_is_refused(group):
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n")
    with pytest.raises(
        cgroups.CgroupsUnavailable,
        match=rf"processes .* \({os.getppid()}\).*Delegate=yes",
    ):
        cgroups.prepare(None, {"memory.max": "1"})


def test_a_group_without_the_needed_controllers_is_refused(group):
    (group / "cgroup.controllers").write_text("hugetlb\n")
    with pytest.raises(cgroups.CgroupsUnavailable, match="no controller cpu or memory"):
        cgroups.prepare(group, {"memory.max": "1", "cpu.max": "1"})


@pytest.fixture
def real_cgroup() -> Iterator[Path]:
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
def test_a_process_joins_its_group_and_is_killed_with_it(real_cgroup, tmp_path):
    group = cgroups.Group(real_cgroup, {"cgroup.max.depth": "0"})
    sandbox = KernelSandbox(Isolation(), [], gpu=False, output="", label="")
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


@needs_cgroups
async def test_only_the_worker_that_exceeds_its_memory_limit_is_killed(tmp_path, caplog):
    async with a_registry(
        worker_preload=False, isolation="on", cache_dir=tmp_path / "cache", **LIMITS
    ) as registry:
        version = await registry.register_path(make_model(tmp_path / "m.mar", HANDLER), order())
        with pytest.raises(OutOfResources):
            await ask(version, "eat")
        assert int(await ask(version, "fork")) < 60
        assert "isolation_memory, 200 MB" in caplog.text
