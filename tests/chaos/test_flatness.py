"""The soak test's decision on whether memory, files and threads grow."""

from __future__ import annotations

import math

import pytest

from benchmarks.chaos.flatness import MIB, Usage, mib_per_hour, rising

# Half an hour of samples, without the warm-up.
SECONDS = range(0, 1440, 15)


def test_oscillating_memory_is_not_a_leak() -> None:
    used = [
        Usage(time, int((100 + 3 * math.sin(time / 70)) * MIB), 50 + time % 7, 4)
        for time in SECONDS
    ]
    assert rising(used) == []
    assert abs(mib_per_hour(used)) < 2


def test_a_small_leak_is_detected_despite_oscillations() -> None:
    per_second = 10 * 250
    used = [
        Usage(time, int((100 + math.sin(time / 70)) * MIB) + per_second * time, 50, 4)
        for time in SECONDS
    ]
    assert rising(used) == ["memory"]
    assert mib_per_hour(used) == pytest.approx(per_second * 3600 / MIB, abs=1)


def test_only_files_and_threads_that_stay_are_reported() -> None:
    assert rising([Usage(time, MIB, 50 + time // 100, 4 + time // 500) for time in SECONDS]) == [
        "files",
        "threads",
    ]
    assert (
        rising(
            [
                Usage(time, MIB, 50 + 10 * (time < 500), 4 + 2 * (600 < time < 700))
                for time in SECONDS
            ]
        )
        == []
    )
