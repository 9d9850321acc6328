"""The processor usage of a server's processes during a load."""

from __future__ import annotations

import os

import pytest

from tsx_cli.bench.load.results import Usage
from tsx_cli.bench.search.usage import UsageSampler


def test_only_samples_during_the_load_count() -> None:
    sampler = UsageSampler(os.getpid(), gpu=False)
    sampler._start_time = 100.0
    sampler.samples = [
        Usage(at_seconds=0.5 * step, cpu=1.0 if 3 <= step <= 8 else 0.0, memory_mib=1)
        for step in range(1, 12)
    ]
    samples = sampler.during(101.0, 3.0)
    assert {sample.cpu for sample in samples} == {1.0}
    assert [sample.at_seconds for sample in samples] == pytest.approx(
        [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    ), "from the start of the load"
    assert sampler.during(None, 3.0) == sampler.samples, (
        "a load that was too short to tell when it began"
    )
