"""How many cores a process may use."""

from __future__ import annotations

import pytest

from tsx_runtime.shared import cores


@pytest.mark.parametrize(("quota", "count"), [("max 100000", 1024), ("250000 100000", 2), ("50000 100000", 1), ("", 1024), (None, 1024)])
def test_the_quota_of_a_container_bounds_the_cores_but_leaves_one(tmp_path, monkeypatch, quota, count):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: range(1024), raising=False)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        cores.QUOTA.write_text(quota)
    assert cores.cpu_count() == count
