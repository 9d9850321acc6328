"""The number of cores that a process may use."""

from __future__ import annotations

import pytest

from tsx_runtime.shared import cores


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"cpu.max": "max 100000"}, 1024),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": ""}, 1024),
        ({}, 1024),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1024),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_a_container_quota_limits_the_cores_to_at_least_one(tmp_path, monkeypatch, files, count):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: range(1024), raising=False)
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.cpu_count() == count
