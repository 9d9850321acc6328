"""Proves that a form answers right: in batches of all sizes, and as the reference or the labels
do.
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
from tsx_runtime.core.shadowing.comparison import compare
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.wire import Item

SIZES = (
    1,
    2,
    3,
    5,
    8,
    17,
    32,
)  # batches that every form is proven with, besides those that are measured
TOGETHER = 8  # rows of a batch whose answers are compared
TWICE = 8  # rows that the reference answers a second time
SHARE = 0.05  # of the time limit, for the reference's answers
LEAST_ROWS = 32  # that the reference answers however long it takes
CALIBRATION = 256  # rows at most; a quarter of what there is


class OutOfTime(Exception):
    """The time limit has ended; the message says during what."""


class Criteria:
    """The options that decide whether answers are right.

    `labels` are those of the held-out rows; `names` are those of the classes, by number.
    """

    def __init__(
        self,
        options: OptimizeOptions,
        labels: Sequence[Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Read the options. Raises UsageError, CliError."""
        self._names = names or {}
        custom = None if options.metric is None else load_metric(options.metric)
        self._custom = custom and custom[1]
        self._limits = parse_limits(options.max_loss, options.tolerance, custom and custom[0])
        self.labels, self._seed = labels, options.seed
        self.sizes = sorted({*SIZES, *parse_numbers(options.batch_sizes, "--batch-sizes")})

    def guard(self, reference: Sequence[ComparedAnswer]) -> FormGuard:
        """For the first rows, of which these are the answers. Raises CliError."""
        labels = self.labels and self.labels[: len(reference)]
        if labels and not self._custom:  # a function of the user's own gets them as they are
            labels = with_names(labels, reference, self._names)
        return FormGuard(reference, self._limits, labels, self._custom, self._seed)

    def batch_keeps(
        self,
        limits: Sequence[Limit],
        rows: Sequence[int],
        alone: Sequence[ComparedAnswer],
        together: Sequence[ComparedAnswer],
    ) -> bool:
        """Whether a form's answers to these rows in a batch keep the limits, compared with its
        answers to each row alone. Only a custom metric needs labels.
        """
        labels = self.labels and self._custom and [self.labels[row] for row in rows]
        try:
            return FormGuard(alone, limits, labels, self._custom, self._seed).keeps(together)
        except CliError:  # these rows have no score
            return False


class Proof:
    """Proves the forms of one model, whose reference answers the held-out rows once for all of
    them.
    """

    def __init__(
        self,
        criteria: Criteria,
        held_out: Sequence[Payload],
        reference: StandaloneWorker,
        ends: float,
        on_rows: Callable[[int], None],
    ) -> None:
        """`ends`: by time.monotonic. Raises CliError, UsageError, WorkerFailed."""
        self._criteria, self._ends, self._on_rows, self._same = (
            criteria,
            ends,
            on_rows,
            parse_tolerance(),
        )
        begun, items = time.monotonic(), items_of(held_out)
        enough = begun + SHARE * (ends - begun)
        answers: list[ComparedAnswer] = []
        while len(answers) < len(items) and (
            len(answers) < LEAST_ROWS or time.monotonic() < enough
        ):
            batch = items[len(answers) : len(answers) + TOGETHER]
            answers += answered(reference, batch, "the archive as it is", CliError)
            on_rows(len(answers))
        self._items, self._reference = items[: len(answers)], answers
        self.rows = len(answers)
        self.guard = criteria.guard(answers)
        if self.guard.shortage is not None:
            needed, reason = self.guard.shortage
            if self.rows == len(items):
                total = needed + min(needed // 3, CALIBRATION)
                raise UsageError(
                    f"--input: {reason}. A quarter of the inputs calibrates forms: give at least"
                    f" {total} different inputs in all, or accept more by --max-loss"
                )
            raise UsageError(
                f"--time-limit: it leaves time for {self.rows} of {len(items)} held-out rows only;"
                f" {reason}"
            )
        again = answered(reference, self._items[:TWICE], "the archive as it is", CliError)
        pairs = zip(answers, again, strict=False)
        if found := next(
            (
                found
                for first, second in pairs
                if (found := compare(self._same, b"", first, second).difference)
            ),
            None,
        ):
            raise CliError(
                "the archive as it is answers the same request differently each time, so no form"
                f" can be compared with it ({found.between('the first time', 'the second time')});"
                " make it deterministic, for example by a fixed seed in its handler"
            )

    def batch_difference(self, worker: StandaloneWorker) -> str | None:
        """The first difference between answers in a batch and alone, in the first batch whose
        differences exceed rounding and break the limits; None if there is none. Raises
        WorkerFailed, OutOfTime.
        """
        alone: dict[int, ComparedAnswer] = {}
        for size, start in zip(
            self._criteria.sizes, accumulate(self._criteria.sizes, initial=0), strict=False
        ):
            rows = [position % self.rows for position in range(start, start + size)]
            for row in rows:
                if row not in alone:
                    self._check_time("while it answered batches of all sizes")
                    alone[row] = answered(worker, [self._items[row]], "it")[0]
            expected, actual = (
                [alone[row] for row in rows],
                answered(worker, [self._items[row] for row in rows], "it"),
            )
            found = [
                compare(self._same, b"", one, other).difference
                for one, other in zip(expected, actual, strict=True)
            ]
            wrong = [
                (at, difference) for at, difference in enumerate(found) if difference is not None
            ]
            judged = [
                other if difference else one
                for one, other, difference in zip(expected, actual, found, strict=True)
            ]
            if wrong and not self._criteria.batch_keeps(self.guard.limits, rows, expected, judged):
                at, first = wrong[0]
                others = f" and {len(wrong) - 1} others" if wrong[1:] else ""
                return (
                    f"row {at + 1} of a batch of {size}{others}:"
                    f" {first.between('alone', 'in the batch')}"
                )
        return None

    def verdict(self, worker: StandaloneWorker) -> GuardVerdict:
        """Of the answers for the held-out rows, of which no more are asked for once a limit is
        broken. Raises WorkerFailed, OutOfTime.
        """
        answers: list[ComparedAnswer] = []
        look = 4 * TOGETHER
        while len(answers) < self.rows:
            self._check_time(f"after {len(answers)} of {self.rows} held-out rows were compared")
            answers += answered(worker, self._items[len(answers) : len(answers) + TOGETHER], "it")
            self._on_rows(len(answers))
            if len(answers) >= look and len(answers) < self.rows:
                look *= 2
                with suppress(CliError):  # too few rows to judge
                    if why := self.guard.hopeless(answers):
                        verdict = self._criteria.guard(self._reference[: len(answers)]).judge(
                            answers
                        )
                        return verdict.model_copy(
                            update={"passed": False, "rows_needed": None, "text": why}
                        )
        try:
            return self.guard.judge(answers)
        except (
            CliError
        ) as error:  # a metric of the user's that takes the reference's answers does not take these
            raise WorkerFailed(f"its answers have no score: {error}") from error

    def _check_time(self, when: str) -> None:
        if time.monotonic() > self._ends:
            raise OutOfTime(f"the time limit ended {when}")


def answered(
    worker: StandaloneWorker,
    batch: Sequence[Item],
    name: str,
    failure: Callable[[str], Exception] = WorkerFailed,
) -> list[ComparedAnswer]:
    """Raises `failure` if an answer is an error, WorkerFailed."""
    answers = worker.answer(batch).answers
    if refused := next((each for each in answers if each.status >= 400), None):
        raise failure(f"{name} answers an input with {refused.status}: {error_text(refused.body)}")
    return answers
