"""The division of the inputs of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tsx_cli.bench.load.payloads import Payload, read_payloads
from tsx_cli.common.failure import CliError
from tsx_cli.optimize.guard.labels import read_labels
from tsx_cli.optimize.journal import PastOptimization
from tsx_cli.optimize.session import divide_rows


def test_labels_stay_with_their_inputs_when_those_are_shuffled_and_drawn(
    tmp_path: Path,
) -> None:
    # Some inputs come twice.
    numbers = [*range(50), *range(10)]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"body": number}) + "\n" for number in numbers)
    )
    (tmp_path / "labels.jsonl").write_text("".join(f"{number}\n" for number in numbers))
    payloads = read_payloads([tmp_path / "in.jsonl"])
    labels = read_labels(tmp_path / "labels.jsonl", payloads)
    for most, count in ((None, 38), (20, 15)):
        rows = divide_rows(payloads, labels, 3, most)
        assert rows.labels == [json.loads(row.body) for row in rows.held_out]
        assert len(set(rows.labels)) == count
        assert rows.labels != sorted(rows.labels)
        calibration, held_out = ({row.body for row in part} for part in rows[:2])
        assert not calibration & held_out
    assert divide_rows(payloads, None, 3).labels is None


def test_a_run_goes_on_only_with_the_inputs_that_it_began_with() -> None:
    """An input that calibrated a form could test it, if there were others."""
    payloads = [Payload(bytes([number])) for number in range(40)]
    past = PastOptimization({}, None, "", "", divide_rows(payloads, list(range(40)), 3).digest())
    past.check_inputs(divide_rows(payloads, list(range(40)), 3).digest())
    for more, labels in (([Payload(b"new")], list(range(41))), ([], [1, *range(39)])):
        with pytest.raises(CliError, match="the inputs or their labels have changed"):
            past.check_inputs(divide_rows([*payloads, *more], labels, 3).digest())
