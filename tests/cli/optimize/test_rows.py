"""The split of a run's inputs into calibration and held-out rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tsx_cli.bench.load.payloads import Payload, read_payloads
from tsx_cli.common.failure import CliError
from tsx_cli.optimize.guard.labels import read_labels
from tsx_cli.optimize.journal import PastOptimization
from tsx_cli.optimize.rows import divide_rows


def test_shuffled_and_sampled_inputs_keep_their_labels(
    tmp_path: Path,
) -> None:
    # Ten inputs occur twice.
    numbers = [*range(50), *range(10)]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"body": number}) + "\n" for number in numbers)
    )
    (tmp_path / "labels.jsonl").write_text("".join(f"{number}\n" for number in numbers))
    payloads = read_payloads([tmp_path / "in.jsonl"])
    labels = read_labels(tmp_path / "labels.jsonl", payloads)
    for max_rows, count in ((None, 38), (20, 15)):
        rows = divide_rows(payloads, labels, 3, max_rows)
        assert rows.labels == [json.loads(row.body) for row in rows.held_out]
        assert len(set(rows.labels)) == count
        assert rows.labels != sorted(rows.labels)
        calibration, held_out = ({row.body for row in part} for part in rows[:2])
        assert not calibration & held_out
    assert divide_rows(payloads, None, 3).labels is None


def test_a_run_resumes_only_with_the_same_inputs() -> None:
    """If inputs changed, a row that calibrated a form could also test it."""
    payloads = [Payload(bytes([number])) for number in range(40)]
    previous_run = PastOptimization(
        {}, None, "", "", divide_rows(payloads, list(range(40)), 3).digest()
    )
    previous_run.check_inputs(divide_rows(payloads, list(range(40)), 3).digest())
    for new_inputs, labels in (([Payload(b"new")], list(range(41))), ([], [1, *range(39)])):
        with pytest.raises(CliError, match="the inputs or their labels have changed"):
            previous_run.check_inputs(divide_rows([*payloads, *new_inputs], labels, 3).digest())
