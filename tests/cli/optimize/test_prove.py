"""The check that a form responds correctly, with real workers instead of forms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.models import make_model
from tsx_archiver import open_archive
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.search.worker import (
    StandaloneWorker,
    WorkerFailed,
    start_worker,
    worker_spec,
)
from tsx_cli.optimize.options import OptimizeOptions
from tsx_cli.optimize.prove import Criteria, OutOfTime, Proof

ROWS = [Payload(b"x" * number) for number in range(200)]
HANDLER = """
def handle(data, context):
    lengths = [len(row.get("data") or row.get("body")) for row in data or []]
    return [{{"name": {name}}} for length in lengths]
"""
CORRECT_EXPRESSION = "('even' if length % 2 == 0 else 'odd')"


@contextmanager
def worker_of(directory: Path, name: str) -> Iterator[StandaloneWorker]:
    """Run a worker that answers each row with the expression `name` over `length` and `lengths`."""
    model = make_model(directory / f"m{len(list(directory.iterdir()))}", HANDLER.format(name=name))
    with (
        open_archive(model) as archive,
        start_worker(worker_spec(archive, Configuration(), 64)) as worker,
    ):
        yield worker


@pytest.mark.usefixtures("processes")
def test_wrong_failing_and_batch_dependent_forms_are_detected(
    tmp_path: Path,
) -> None:
    options, counts = OptimizeOptions(max_loss="exact>=-5%"), list[int]()
    with ExitStack() as stack:
        reference, batch_dependent, wrong, failing = (
            stack.enter_context(worker_of(tmp_path, name))
            for name in (
                CORRECT_EXPRESSION,
                f"{CORRECT_EXPRESSION} if len(lengths) < 17 else 'many'",
                f"{CORRECT_EXPRESSION} if length % 3 else 'none'",
                f"1 / (length - 50) and {CORRECT_EXPRESSION}",
            )
        )
        proof = Proof(Criteria(options), ROWS, reference, math.inf, counts.append)
        assert (proof.rows, counts[-1]) == (200, 200)

        assert proof.batch_difference(reference) is None
        correct_verdict = proof.verdict(reference)
        assert (correct_verdict.passed, correct_verdict.loss, correct_verdict.rows) == (
            True,
            0,
            200,
        )

        assert "row 1 of a batch of 17 and 16 others: name: " in str(
            proof.batch_difference(batch_dependent)
        )

        assert proof.batch_difference(wrong) is None
        verdict = proof.verdict(wrong)
        assert not verdict.passed
        assert verdict.loss == pytest.approx(1 / 3, abs=0.1)
        assert counts[-1] < 100, "no more rows are compared once it cannot pass"
        assert "cannot be kept any more" in verdict.text

        with pytest.raises(WorkerFailed, match="it answers an input with 5"):
            proof.verdict(failing)
        proof._deadline = 0.0
        with pytest.raises(OutOfTime, match="after 0 of 200 held-out rows"):
            proof.verdict(reference)


@pytest.mark.usefixtures("processes")
def test_a_failing_metric_fails_only_its_form(tmp_path: Path) -> None:
    metric = tmp_path / "metrics.py"
    metric.write_text(
        "def known(answers, labels):\n"
        "    scores = {'even': 1, 'odd': 1}\n"
        "    return sum(scores[answer['name']] for answer in answers) / len(answers)\n"
    )
    (models := tmp_path / "models").mkdir()
    with (
        worker_of(models, CORRECT_EXPRESSION) as reference,
        worker_of(models, f"{CORRECT_EXPRESSION} if length % 3 else 'none'") as wrong,
    ):
        options = OptimizeOptions(metric=f"{metric}:known")
        proof = Proof(Criteria(options), ROWS[:40], reference, math.inf, lambda _: None)
        with pytest.raises(WorkerFailed, match="raised KeyError: 'none'"):
            proof.verdict(wrong)


@pytest.mark.usefixtures("processes")
def test_batch_differences_beyond_rounding_must_stay_within_the_limit(
    tmp_path: Path,
) -> None:
    small_error, large_error, last_row_error, batch_of_64 = (
        f"[0.25 + length, 5.0 + {off}]"
        for off in (
            "0.1 * (len(lengths) == 17)",
            "9 * (len(lengths) == 17)",
            "99 * (len(lengths) == 32 and length == lengths[-1])",
            "99 * (len(lengths) == 64)",
        )
    )
    rows = ROWS[20:]
    loose_options = OptimizeOptions(max_loss="cosine>=0.8", batch_sizes="1")
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_of(tmp_path, name))
            for name in (small_error, large_error, last_row_error, batch_of_64)
        ]

        def differing_rows(options: OptimizeOptions) -> list[str | None]:
            proof = Proof(Criteria(options), rows, workers[0], math.inf, lambda _: None)
            return [
                difference and difference.split(":")[0]
                for difference in map(proof.batch_difference, workers)
            ]

        row = "row 32 of a batch of 32"
        assert differing_rows(OptimizeOptions()) == [
            None,
            "row 1 of a batch of 17 and 16 others",
            row,
            None,
        ]
        assert differing_rows(loose_options) == [None, None, None, None], "the user's limit decides"
        assert (
            differing_rows(OptimizeOptions(batch_sizes="64"))[3]
            == "row 1 of a batch of 64 and 63 others"
        )
