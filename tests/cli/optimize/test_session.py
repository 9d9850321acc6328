"""How the inputs of a run are divided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tsx_cli.bench.load.payloads import Payload, read_payloads
from tsx_cli.common.failure import CliError
from tsx_cli.optimize.guard.labels import read_labels
from tsx_cli.optimize.journal import PastOptimization
from tsx_cli.optimize.session import divided


def test_labels_in_the_order_of_the_inputs_stay_with_them_when_they_are_shuffled_and_drawn(
    tmp_path: Path,
) -> None:
    numbers = [*range(50), *range(10)]  # some come twice
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"body": number}) + "\n" for number in numbers)
    )
    (tmp_path / "labels.jsonl").write_text("".join(f"{number}\n" for number in numbers))
    payloads = read_payloads([tmp_path / "in.jsonl"])
    labels = read_labels(tmp_path / "labels.jsonl", payloads)
    for most, count in ((None, 38), (20, 15)):
        rows = divided(payloads, labels, 3, most)
        assert rows.labels == [json.loads(each.body) for each in rows.held_out]
        assert len(set(rows.labels)) == count
        assert rows.labels != sorted(rows.labels)
        assert not {each.body for each in rows.calibration} & {each.body for each in rows.held_out}
    assert divided(payloads, None, 3).labels is None


def test_a_run_goes_on_only_with_the_inputs_that_it_began_with() -> None:
    """Among others an input that has calibrated a form would test it."""
    payloads = [Payload(bytes([number])) for number in range(40)]
    past = PastOptimization({}, None, "", "", divided(payloads, list(range(40)), 3).digest())
    past.check_inputs(divided(payloads, list(range(40)), 3).digest())
    for more, labels in (([Payload(b"new")], list(range(41))), ([], [1, *range(39)])):
        with pytest.raises(
            CliError, match="the inputs or their labels have changed since that run started"
        ):
            past.check_inputs(divided([*payloads, *more], labels, 3).digest())
