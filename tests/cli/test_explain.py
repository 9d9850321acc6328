"""The output of `tsx explain` and `tsx slowest`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.common.stages import LETTERS, PARTS, WIDTH, bar, strip
from tsx_cli.explain.command import lines

EXPLANATION = {
    "requestId": "id-1",
    "modelName": "digits",
    "modelVersion": "1.0",
    "status": 200,
    "arrived": "2026-05-30T21:46:03.626Z",
    "batchSize": 4,
    "milliseconds": {
        "queue": 0.0,
        "batch": 1.0,
        "preprocess": 3.0,
        "inference": 6.0,
        "other": 0.0,
        "total": 10.0,
    },
}


def test_each_part_has_its_line_and_a_bar() -> None:
    output_lines = lines(EXPLANATION)
    assert output_lines[0] == "id-1 was answered with 200 after 10.000 ms"
    assert output_lines[1] == "digits 1.0, in a batch of 4; it arrived at 2026-05-30T21:46:03.626Z"
    parts = {line.split()[0]: line for line in output_lines[3:]}
    assert [*parts] == ["queue", "batch", "preprocess", "inference", "other"]
    assert bar(6.0, 10.0) in parts["inference"]
    assert "6.000 ms" in parts["inference"]


def test_a_refusal_has_no_parts() -> None:
    refusal = {"status": 503, "error": "QueueFull", "batchSize": None}
    assert lines({**EXPLANATION, **refusal, "milliseconds": {"total": 120.0}}) == [
        "id-1 was refused (QueueFull) with 503 after 120 ms",
        "digits 1.0; it arrived at 2026-05-30T21:46:03.626Z",
    ]


@given(st.dictionaries(st.sampled_from([*PARTS]), st.floats(0, 1e6), max_size=6))
def test_a_bar_has_a_fixed_width_and_ordered_letters(seconds_by_part: dict[str, float]) -> None:
    bar = strip(seconds_by_part)
    assert len(bar) == (WIDTH if sum(seconds_by_part.values()) > 0 else 0)
    assert list(bar) == sorted(bar, key=list(LETTERS.values()).index)
