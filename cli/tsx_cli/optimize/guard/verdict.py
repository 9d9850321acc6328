"""The accuracy guard decides with 95 % confidence whether a form keeps the limits.

Later requests may be unlike all held-out rows. With 95 % confidence, the fraction of such rows is
at most 1 - 0.05^(1/rows). If a metric counts right and wrong rows, an unlike row counts as entirely
lost. For other metrics it counts as a loss of ten times the limit. Therefore a limit of the cosine
needs 29 rows, even if all answers are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tsx_cli.common.client import error_text
from tsx_cli.common.failure import CliError
from tsx_cli.optimize.guard.answers import decode
from tsx_cli.optimize.guard.intervals import (
    mean_bound,
    net_bound,
    resampled_bound,
    rows_for,
    share_bound,
)
from tsx_cli.optimize.guard.limits import Custom, Limit
from tsx_cli.optimize.guard.metrics import default_limits, metric_of
from tsx_cli.optimize.results import MAX_FEASIBLE_ROWS, GuardVerdict
from tsx_runtime.core.comparison.difference import excerpt
from tsx_runtime.plugins import ComparedAnswer

UNLIKE_FACTOR = 10.0  # loss of an unlike row, as a multiple of the accepted loss


class FormGuard:
    """A judge of forms. It uses the reference's answers to the held-out rows, or labels.

    `reference`, `labels` and the answers of a form are in the order of the rows.
    """

    def __init__(
        self,
        reference: Sequence[ComparedAnswer],
        limits: Sequence[Limit] = (),  # If empty, `default_limits` apply.
        labels: Sequence[Any] | None = None,
        custom: Custom | None = None,
        seed: int = 0,
    ) -> None:
        """Score the reference.

        Raises:
            CliError: The reference fails on a row, or its score leaves no margin for a form.
        """
        for answer in reference:
            if answer.status >= 400:
                reason = error_text(answer.body).rstrip(".")
                raise CliError(
                    f"the model as it is answers a row with {answer.status}: {reason}. Correct the"
                    " handler, or --input"
                )
        self._types = [answer.headers.get("content-type") for answer in reference]
        values = [decode(answer) for answer in reference]
        self.limits = tuple(limits) or default_limits(values)
        self._rules = [_Rule(limit, values, labels, custom, seed) for limit in self.limits]
        self._scored: list[tuple[ComparedAnswer, bool, list[Any]]] = []

    @property
    def limit(self) -> str:
        return ", ".join(limit.text for limit in self.limits)

    @property
    def shortage(self) -> tuple[int, str] | None:
        """The number of rows that a form needs to pass, and the reason, if there are too few."""
        return max(filter(None, (rule.shortage() for rule in self._rules)), default=None)

    def judge(self, answers: Sequence[ComparedAnswer]) -> GuardVerdict:
        """Return the verdict of a broken limit, or else of the limit closest to breaking."""
        if len(answers) != len(self._types):
            raise ValueError(f"there are {len(answers)} answers for {len(self._types)} rows")
        failed = self._score(answers)
        verdicts = [
            rule.judge(rows, failed)
            for rule, rows in zip(self._rules, self._columns(len(answers)), strict=True)
        ]
        verdict = min(verdicts, key=lambda pair: pair[0])[1]
        needed_rows = [item.rows_needed for _, item in verdicts if item.rows_needed is not None]
        return (
            verdict
            if verdict.rows_needed is None
            else verdict.model_copy(update={"rows_needed": max(needed_rows)})
        )

    def is_within_limits(self, answers: Sequence[ComparedAnswer]) -> bool:
        """Tell whether these answers keep every limit; other rows are not considered."""
        failed = self._score(answers)
        return not failed and all(
            rule.point(rows) <= rule.allowed
            for rule, rows in zip(self._rules, self._columns(len(answers)), strict=True)
        )

    def hopeless_reason(self, answers: Sequence[ComparedAnswer]) -> str | None:
        """Return why a form breaks a limit whatever its answers to the remaining rows are."""
        failed = self._score(answers)
        columns = self._columns(len(answers))
        return next(
            (
                reason
                for rule, rows in zip(self._rules, columns, strict=True)
                if (reason := rule.hopeless_reason(rows, failed))
            ),
            None,
        )

    def _columns(self, count: int) -> list[list[Any]]:
        return [
            [rows[number] for _, _, rows in self._scored[:count]]
            for number in range(len(self._rules))
        ]

    def _score(self, answers: Sequence[ComparedAnswer]) -> int:
        """Score the answers that the previous call did not score; return the number of failures."""
        for position, answer in enumerate(answers):
            if position < len(self._scored) and self._scored[position][0] is answer:
                continue
            del self._scored[position:]
            has_failed = (
                answer.status >= 400 or answer.headers.get("content-type") != self._types[position]
            )
            value = None if has_failed else decode(answer)
            self._scored.append(
                (
                    answer,
                    has_failed,
                    [rule.row(position, value, has_failed) for rule in self._rules],
                )
            )
        return sum(has_failed for _, has_failed, _ in self._scored[: len(answers)])


class _Rule:
    """A limit, applied to the scores of rows.

    `allowed` is the largest loss. `allowance` is the part of it that the reference has not used.
    """

    def __init__(
        self,
        limit: Limit,
        values: Sequence[Any],
        labels: Sequence[Any] | None,
        custom: Custom | None,
        seed: int,
    ) -> None:
        self.limit, self.metric = limit, metric_of(limit, custom)
        self.seed, self.rows = seed, len(values)
        self.is_exact = limit.tolerance is not None  # No row may be lost.
        self.is_agreement = labels is None or self.is_exact
        to_truth, subject = (
            (self.metric.truth, "an answer")
            if self.is_agreement
            else (self.metric.of_label, "a label or an answer")
        )
        try:
            self.truths = [
                to_truth(value)
                for value in (values if self.is_agreement or labels is None else labels)
            ]
            self.reference_rows = [
                self.metric.row(value, truth)
                for value, truth in zip(values, self.truths, strict=True)
            ]
        except ValueError as error:
            raise CliError(
                f"{limit.metric} does not fit {subject} of the model as it is: {error}. Give"
                " another --max-loss"
            ) from error
        self.base = self.reference_rows if limit.relative else [1.0] * self.rows
        self.score = self.metric.score(self.reference_rows)
        self.value = self.score([1] * self.rows)
        self.allowed = (
            limit.amount if limit.relative else 1 - limit.amount if self.metric.points else 0.0
        )
        self.allowance = self.allowed - self._loss(self.value, self.value)
        if self.value <= 0 if self.metric.points else self.value == 0 and limit.relative:
            advice = (
                self._label_mismatch(values[0], labels[0])
                if labels and not self.is_agreement
                else "; correct --max-loss"
            )
            raise CliError(
                f"the model as it is has {limit.metric} {self.value:.5g}, so no loss can be"
                f" measured{advice}"
            )
        if self.allowance <= 0 and not self.is_exact:
            raise CliError(
                f"the model as it is has {limit.metric} {self.value:.5g}: no form can keep"
                f" {limit.text}; change --max-loss"
            )

    def _label_mismatch(self, answer: Any, label: Any) -> str:
        best, truth = self.metric.truth(answer), self.truths[0]
        if isinstance(best, frozenset):
            answer, label = (" or ".join(sorted(labels)) for labels in (best, truth))
        else:
            answer, label = excerpt(answer), excerpt(label)
        return (
            f": for the first row the model says '{answer}', the file says '{label}'; correct"
            " --labels"
        )

    def row(self, position: int, value: Any, has_failed: bool) -> Any:
        truth = self.truths[position]
        try:
            return self.metric.missing(truth) if has_failed else self.metric.row(value, truth)
        except ValueError:
            return self.metric.missing(truth)

    def judge(self, rows: Sequence[Any], failed: int) -> tuple[tuple[bool, float], GuardVerdict]:
        """Return a sort key of the verdict, and the verdict.

        The key tells whether these rows keep the limit, and the remaining fraction of the
        allowance. The fraction is negative if the limit is not proven.
        """
        needed_rows = None
        if failed and self.metric.best is None:
            value, loss, point, upper_loss = 0.0, 1.0, 1.0, 1.0
            text = f"{failed} of {self.rows} rows failed, which {self.limit.metric} cannot score"
        else:
            value = self.metric.score(rows)([1] * self.rows)
            point, bound, unlike = self._bounds(rows)
            loss = self._change(self.value, value)
            if failed:
                share = failed / self.rows
                loss, point, bound = (
                    max(loss, share),
                    max(point, share),
                    max(bound, share_bound(failed, self.rows)),
                )
            upper_loss = max(bound, point + unlike * share_bound(0, self.rows))
            text = self._score_text(value, rows, failed)
            if point > self.allowed:
                text += f", which breaks {self.limit.text}"
            elif upper_loss <= self.allowed or self.is_exact:
                text += f"; with 95 % confidence {self._bound_text(upper_loss)}"
            else:
                needed_rows, about_text = self._needed_rows(point, bound, unlike, rows)
                count_text = (
                    f"{about_text}{needed_rows} rows, {needed_rows - self.rows} more"
                    if needed_rows < MAX_FEASIBLE_ROWS
                    else "many millions of rows"
                )
                text += f"; 95 % confidence of {self.limit.text} needs {count_text}"
        passed = (point if self.is_exact else upper_loss) <= self.allowed
        verdict = GuardVerdict(
            passed=passed,
            metric=self.limit.metric,
            limit=self.limit.text,
            value=value,
            reference=self.value,
            loss=loss,
            loss_bound=loss + upper_loss - point,
            rows=self.rows,
            rows_needed=needed_rows,
            text=text,
        )
        return (
            point <= self.allowed,
            1.0 if self.is_exact else (self.allowed - upper_loss) / self.allowance,
        ), verdict

    def hopeless_reason(self, rows: Sequence[Any], failed: int) -> str | None:
        """Return why the limit is broken even if the remaining rows have the best score."""
        if self.metric.best is None:
            return (
                f"{failed} rows failed, which {self.limit.metric} cannot score" if failed else None
            )
        best_rows = [*rows, *map(self.metric.best, self.truths[len(rows) :])]
        if max(self.point(best_rows), failed / self.rows) <= self.allowed:
            return None
        text = self._score_text(self.metric.score(rows)([1] * len(rows)), rows, failed)
        return f"{text}: {'it' if self.is_exact else self.limit.text} cannot be kept any more"

    def shortage(self) -> tuple[int, str] | None:
        if self.is_exact:
            return None
        if self.metric.kind == "share":
            max_loss, bound = (
                self.allowed,
                net_bound(0, self._pairs([True] * self.rows)[1], self.rows),
            )
        else:
            max_loss, bound = (
                self.allowance if self.metric.full_loss else 1 / UNLIKE_FACTOR,
                share_bound(0, self.rows),
            )
        if bound <= max_loss:
            return None
        needed_rows = rows_for(max_loss)
        return needed_rows, (
            f"{self.limit.text} needs at least {needed_rows} held-out rows to be shown with 95 %"
            f" confidence; there are {self.rows}"
        )

    def point(self, rows: Sequence[Any]) -> float:
        """Return the loss of these rows."""
        if self.metric.kind == "share":
            losses, gains = self._pairs(rows)
            return (losses - gains) / self.rows
        return self._loss(self.value, self.metric.score(rows)([1] * self.rows))

    def _bounds(self, rows: Sequence[Any]) -> tuple[float, float, float]:
        """Return the loss, its bound, and the loss of a row that is unlike all others."""
        if self.metric.kind == "share":
            return self.point(rows), net_bound(*self._pairs(rows), self.rows), 0.0
        if self.metric.kind == "mean":
            losses = [base - row for base, row in zip(self.base, rows, strict=True)]
            point, bound = math.fsum(losses) / self.rows, mean_bound(losses)
        elif self.limit.relative and list(rows) == self.reference_rows:
            point = bound = 0.0  # Equal rows have no loss, in every sample.
        else:
            score = self.metric.score(rows)
            point, bound = resampled_bound(
                lambda times: self._loss(self.score(times), score(times)), self.rows, self.seed
            )
        full_loss = bound <= point if self.metric.full_loss is None else self.metric.full_loss
        return point, bound, 1.0 if full_loss else UNLIKE_FACTOR * self.allowance

    def _pairs(self, rows: Sequence[Any]) -> tuple[int, int]:
        """Return the number of lost rows, and the number of gained rows."""
        pairs = list(zip(self.base, rows, strict=True))
        return sum(bool(base) and not row for base, row in pairs), sum(
            bool(row) and not base for base, row in pairs
        )

    def _loss(self, reference: float, value: float) -> float:
        """Return the change from the reference, from 1, or from the value of the limit."""
        if self.limit.relative:
            return self._change(reference, value)
        return 1 - value if self.metric.points else self._change(self.limit.amount, value)

    def _change(self, reference: float, value: float) -> float:
        difference = value - reference if self.metric.less else reference - value
        return difference if self.metric.points else difference / (abs(reference) or 1.0)

    def _needed_rows(
        self, point: float, bound: float, unlike: float, rows: Sequence[Any]
    ) -> tuple[int, str]:
        """Return how many rows would prove the limit, and "about " if the number is an estimate."""
        if self.metric.kind == "share" and self._pairs(rows) == (0, 0):
            count, about_text = rows_for(self.allowed), ""
        else:
            margin = max(self.allowed - point, 1e-9)
            # The width of the interval is proportional to 1 / sqrt(rows).
            spread = math.ceil(self.rows * ((bound - point) / margin) ** 2)
            count, about_text = (
                max(spread, rows_for(min(margin / unlike, 1.0)) if unlike else 0),
                "about ",
            )
        return max(count, self.rows + 1), about_text

    def _bound_text(self, bound: float) -> str:
        if self.is_exact:
            return f"at most {_percent(bound)} of all rows differ more"
        if self.limit.relative:
            return f"the loss is at most {_percent(max(bound, 0.0))}"
        scale, amount = (
            (1.0, 1.0) if self.metric.points else (abs(self.limit.amount) or 1.0, self.limit.amount)
        )
        return (
            f"it is at {'most' if self.metric.less else 'least'}"
            f" {amount + (bound if self.metric.less else -bound) * scale:.5g}"
        )

    def _score_text(self, value: float, rows: Sequence[Any], failed: int) -> str:
        name = self.limit.text if self.is_exact else self.limit.metric
        if self.metric.kind == "share":
            verb = (
                "holds for"
                if self.is_exact
                else "agreed on"
                if self.is_agreement
                else "is right on"
            )
            text = f"{name} {verb} {sum(map(bool, rows))} of {len(rows)} rows"
            text += (
                ""
                if self.is_agreement
                else f", the reference on {sum(map(bool, self.reference_rows[: len(rows)]))}"
            )
        else:
            reference_text = (
                ""
                if self.is_agreement and self.metric.points
                else f", of the reference {self.value:.5g}"
            )
            text = f"{name} is {value:.5g} on {len(rows)} rows{reference_text}"
        return f"{text}; {failed} failed" if failed else text


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
