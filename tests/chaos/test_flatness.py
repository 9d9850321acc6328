"""The soak's judgement of what is flat."""

from __future__ import annotations

import math

import pytest

from benchmarks.chaos.flatness import MIB, Usage, mib_per_hour, rising

# A soak takes half an hour, without its warm-up.
SECONDS = range(0, 1440, 15)


def test_memory_that_swings_about_a_level_is_flat() -> None:
    used = [Usage(at, int((100 + 3 * math.sin(at / 70)) * MIB), 50 + at % 7, 4) for at in SECONDS]
    assert rising(used) == []
    assert abs(mib_per_hour(used)) < 2


def test_a_leak_of_ten_bytes_a_request_is_found_below_the_swings() -> None:
    per_second = 10 * 250
    used = [
        Usage(at, int((100 + math.sin(at / 70)) * MIB) + per_second * at, 50, 4) for at in SECONDS
    ]
    assert rising(used) == ["memory"]
    assert mib_per_hour(used) == pytest.approx(per_second * 3600 / MIB, abs=1)


def test_files_and_threads_that_do_not_come_back_are_found_and_those_that_do_are_not() -> None:
    assert rising([Usage(at, MIB, 50 + at // 100, 4 + at // 500) for at in SECONDS]) == [
        "files",
        "threads",
    ]
    assert (
        rising([Usage(at, MIB, 50 + 10 * (at < 500), 4 + 2 * (600 < at < 700)) for at in SECONDS])
        == []
    )
