"""The proof that a form is accurate.

Its answers in batches of all sizes must agree with its answers to single rows. They must also agree
with the reference or the labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from tsx_cli.bench.load.configuration import parse_numbers
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.search.accuracy import parse_tolerance
from tsx_cli.bench.search.worker import StandaloneWorker, WorkerFailed, items_of
from tsx_cli.common.client import error_text
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.optimize.guard.labels import with_names
from tsx_cli.optimize.guard.limits import Limit, load_metric, parse_limits
from tsx_cli.optimize.guard.verdict import FormGuard
from tsx_cli.optimize.options import OptimizeOptions
from tsx_cli.optimize.results import GuardVerdict
from tsx_runtime.core.comparison.comparison import compare
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.wire import Item

# Batch sizes with which every form is proven, in addition to the measured ones.
PROVEN_SIZES = (1, 2, 3, 5, 8, 17, 32)
BATCH_ROWS = 8  # size of the batches for comparing answers
REPEATED_ROWS = 8  # rows that the reference answers twice
REFERENCE_SHARE = 0.05  # fraction of the time limit for the reference's answers
MIN_REFERENCE_ROWS = 32  # rows that the reference answers in any case
MAX_CALIBRATION_ROWS = 256  # A quarter of the inputs is used if that is less.


class OutOfTime(Exception):
    """The time limit ended; the message contains the step."""


class Criteria:
    """The criteria of right answers, made from the options.

    `labels` belong to the held-out rows; `names` are the names of classes by number.
    """

    def __init__(
        self,
        options: OptimizeOptions,
        labels: Sequence[Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Parse the options.

        Raises:
            UsageError: An option is wrong.
            CliError: A file cannot be read.
        """
        self._names = names or {}
        custom = None if options.metric is None else load_metric(options.metric)
        self._custom = custom and custom[1]
        self._limits = parse_limits(options.max_loss, options.tolerance, custom and custom[0])
        self.labels, self._seed = labels, options.seed
        self.measured_sizes = list(parse_numbers(options.batch_sizes, "--batch-sizes"))
        self.sizes = sorted({*PROVEN_SIZES, *self.measured_sizes})

    def guard(self, reference: Sequence[ComparedAnswer]) -> FormGuard:
        """Return the guard for the first rows, for which the reference has these answers.

        Raises:
            CliError: The answers have no score.
        """
        labels = self.labels and self.labels[: len(reference)]
        if labels and not self._custom:  # A user's function gets the labels unchanged.
            labels = with_names(labels, reference, self._names)
        return FormGuard(reference, self._limits, labels, self._custom, self._seed)

    def is_batch_within_limits(
        self,
        limits: Sequence[Limit],
        rows: Sequence[int],
        single_answers: Sequence[ComparedAnswer],
        batched_answers: Sequence[ComparedAnswer],
    ) -> bool:
        """Tell whether batched answers keep the limits, compared with answers to single rows.

        Only a custom metric needs labels.
        """
        labels = self.labels and self._custom and [self.labels[row] for row in rows]
        try:
            return FormGuard(
                single_answers, limits, labels, self._custom, self._seed
            ).is_within_limits(batched_answers)
        except CliError:  # The metric cannot score these rows.
            return False


class Proof:
    """The proof of a model's forms.

    The reference answers the held-out rows only once, for all forms.
    """

    def __init__(
        self,
        criteria: Criteria,
        held_out: Sequence[Payload],
        reference: StandaloneWorker,
        deadline: float,
        on_rows: Callable[[int], None],
    ) -> None:
        """Get the reference's answers, within a fraction of the time limit.

        Args:
            criteria: The criteria of right answers.
            held_out: The held-out rows.
            reference: The worker of the unchanged model.
            deadline: The end of the run, a value of time.monotonic.
            on_rows: A callback that receives the number of answers.

        Raises:
            CliError: The reference fails, or answers differently each time.
            UsageError: There are too few rows.
            WorkerFailed: The worker failed.
        """
        self._criteria, self._deadline, self._on_rows = criteria, deadline, on_rows
        self._tolerance = parse_tolerance()
        start_time, items = time.monotonic(), items_of(held_out)
        reference_deadline = start_time + REFERENCE_SHARE * (deadline - start_time)
        answers: list[ComparedAnswer] = []
        while len(answers) < len(items) and (
            len(answers) < MIN_REFERENCE_ROWS or time.monotonic() < reference_deadline
        ):
            batch = items[len(answers) : len(answers) + BATCH_ROWS]
            answers += answer_batch(reference, batch, "the archive as it is", CliError)
            on_rows(len(answers))
        self._items, self._reference = items[: len(answers)], answers
        self.rows = len(answers)
        self.guard = criteria.guard(answers)
        if self.guard.shortage is not None:
            needed_rows, reason = self.guard.shortage
            if self.rows == len(items):
                total = needed_rows + min(needed_rows // 3, MAX_CALIBRATION_ROWS)
                raise UsageError(
                    f"--input: {reason}. A quarter of the inputs calibrates forms: give at least"
                    f" {total} different inputs in all, or accept more by --max-loss"
                )
            raise UsageError(
                f"--time-limit: it leaves time for {self.rows} of {len(items)} held-out rows only;"
                f" {reason}"
            )
        repeated = answer_batch(
            reference, self._items[:REPEATED_ROWS], "the archive as it is", CliError
        )
        pairs = zip(answers, repeated, strict=False)
        if difference := next(
            (
                difference
                for first, second in pairs
                if (difference := compare(self._tolerance, b"", first, second).difference)
            ),
            None,
        ):
            raise CliError(
                "the archive as it is answers the same request differently each time, so no form"
                " can be compared with it"
                f" ({difference.between('the first time', 'the second time')});"
                " make it deterministic, for example by a fixed seed in its handler"
            )

    def batch_difference(self, worker: StandaloneWorker) -> str | None:
        """Return the first difference between answers in a batch and answers to single rows.

        A difference counts if it exceeds rounding and its batch breaks the limits.

        Raises:
            WorkerFailed: The worker failed.
            OutOfTime: The time limit ended.
        """
        answers_by_row: dict[int, ComparedAnswer] = {}
        for size, start in zip(
            self._criteria.sizes, accumulate(self._criteria.sizes, initial=0), strict=False
        ):
            rows = [position % self.rows for position in range(start, start + size)]
            for row in rows:
                if row not in answers_by_row:
                    self._check_time("while it answered batches of all sizes")
                    answers_by_row[row] = answer_batch(worker, [self._items[row]], "it")[0]
            expected, actual = (
                [answers_by_row[row] for row in rows],
                answer_batch(worker, [self._items[row] for row in rows], "it"),
            )
            differences = [
                compare(self._tolerance, b"", single_answer, batched_answer).difference
                for single_answer, batched_answer in zip(expected, actual, strict=True)
            ]
            faults = [
                (index, difference)
                for index, difference in enumerate(differences)
                if difference is not None
            ]
            answers_to_judge = [
                batched_answer if difference else single_answer
                for single_answer, batched_answer, difference in zip(
                    expected, actual, differences, strict=True
                )
            ]
            if faults and not self._criteria.is_batch_within_limits(
                self.guard.limits, rows, expected, answers_to_judge
            ):
                index, first_difference = faults[0]
                suffix = f" and {len(faults) - 1} others" if faults[1:] else ""
                return (
                    f"row {index + 1} of a batch of {size}{suffix}:"
                    f" {first_difference.between('alone', 'in the batch')}"
                )
        return None

    def verdict(self, worker: StandaloneWorker) -> GuardVerdict:
        """Return the verdict of a form; no further rows are sent once a limit is broken.

        Raises:
            WorkerFailed: The worker failed, or its answers have no score.
            OutOfTime: The time limit ended.
        """
        answers: list[ComparedAnswer] = []
        next_check = 4 * BATCH_ROWS
        while len(answers) < self.rows:
            self._check_time(f"after {len(answers)} of {self.rows} held-out rows were compared")
            answers += answer_batch(
                worker, self._items[len(answers) : len(answers) + BATCH_ROWS], "it"
            )
            self._on_rows(len(answers))
            if len(answers) >= next_check and len(answers) < self.rows:
                next_check *= 2
                with suppress(CliError):  # There may be too few rows to judge.
                    if reason := self.guard.hopeless_reason(answers):
                        verdict = self._criteria.guard(self._reference[: len(answers)]).judge(
                            answers
                        )
                        return verdict.model_copy(
                            update={"passed": False, "rows_needed": None, "text": reason}
                        )
        try:
            return self.guard.judge(answers)
        except CliError as error:  # The user's metric cannot score these answers.
            raise WorkerFailed(f"its answers have no score: {error}") from error

    def _check_time(self, step: str) -> None:
        if time.monotonic() > self._deadline:
            raise OutOfTime(f"the time limit ended {step}")


def answer_batch(
    worker: StandaloneWorker,
    batch: Sequence[Item],
    name: str,
    failure: Callable[[str], Exception] = WorkerFailed,
) -> list[ComparedAnswer]:
    """Return a worker's answers to a batch.

    Raises:
        WorkerFailed: The worker failed.
        Exception: An answer is an error; `failure` makes the exception.
    """
    answers = worker.answer(batch).answers
    if error_answer := next((answer for answer in answers if answer.status >= 400), None):
        raise failure(
            f"{name} answers an input with {error_answer.status}: {error_text(error_answer.body)}"
        )
    return answers
