"""The accuracy guard: decides whether a form loses no more than the limit allows, with 95 %
confidence.

Later requests may be unlike all held-out rows: with 95 % confidence, at most a share of 1 -
0.05^(1/rows) of them is. Such a row counts as lost entirely by metrics of right and wrong rows, and
as a loss of ten times the limit by others. So a limit of cosine needs 29 rows, even if all answers
are equal.
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
from tsx_cli.optimize.results import MANY, GuardVerdict
from tsx_runtime.core.shadowing.difference import excerpt
from tsx_runtime.plugins import ComparedAnswer

UNLIKE = 10.0  # times the accepted loss


class FormGuard:
    """Judges forms by the reference's answers for the held-out rows, and by labels if there are
    any.

    `reference` and `labels` are in the order of the rows; so are the answers of a form.
    """

    def __init__(
        self,
        reference: Sequence[ComparedAnswer],
        limits: Sequence[Limit] = (),  # none: by the kind of the answers
        labels: Sequence[Any] | None = None,
        custom: Custom | None = None,
        seed: int = 0,
    ) -> None:
        """Raises CliError."""
        for answer in reference:
            if answer.status >= 400:
                why = error_text(answer.body).rstrip(".")
                raise CliError(
                    f"the model as it is answers a row with {answer.status}: {why}. Correct the"
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
        """Return how many rows a form needs to pass, and the reason, if there are too few."""
        return max(filter(None, (rule.shortage() for rule in self._rules)), default=None)

    def judge(self, answers: Sequence[ComparedAnswer]) -> GuardVerdict:
        """Of several limits, one that is broken, else that which comes closest."""
        if len(answers) != len(self._types):
            raise ValueError(f"there are {len(answers)} answers for {len(self._types)} rows")
        failed = self._score(answers)
        verdicts = [
            rule.judge(rows, failed)
            for rule, rows in zip(self._rules, self._columns(len(answers)), strict=True)
        ]
        verdict = min(verdicts, key=lambda each: each[0])[1]
        needed = [each.rows_needed for _, each in verdicts if each.rows_needed is not None]
        return (
            verdict
            if verdict.rows_needed is None
            else verdict.model_copy(update={"rows_needed": max(needed)})
        )

    def keeps(self, answers: Sequence[ComparedAnswer]) -> bool:
        """Whether these answers by themselves keep every limit, without confidence for other
        rows.
        """
        failed = self._score(answers)
        return not failed and all(
            rule.point(rows) <= rule.allowed
            for rule, rows in zip(self._rules, self._columns(len(answers)), strict=True)
        )

    def hopeless(self, answers: Sequence[ComparedAnswer]) -> str | None:
        """Why a form with these answers for the first rows breaks a limit, whatever it answers for
        the others.
        """
        failed = self._score(answers)
        columns = self._columns(len(answers))
        return next(
            (
                why
                for rule, rows in zip(self._rules, columns, strict=True)
                if (why := rule.hopeless(rows, failed))
            ),
            None,
        )

    def _columns(self, count: int) -> list[list[Any]]:
        return [
            [rows[number] for _, _, rows in self._scored[:count]]
            for number in range(len(self._rules))
        ]

    def _score(self, answers: Sequence[ComparedAnswer]) -> int:
        """The number of failures. Answers of the last call are not scored again."""
        for position, answer in enumerate(answers):
            if position < len(self._scored) and self._scored[position][0] is answer:
                continue
            del self._scored[position:]
            fails = (
                answer.status >= 400 or answer.headers.get("content-type") != self._types[position]
            )
            value = None if fails else decode(answer)
            self._scored.append(
                (answer, fails, [rule.row(position, value, fails) for rule in self._rules])
            )
        return sum(fails for _, fails, _ in self._scored[: len(answers)])


class _Rule:
    """A limit, applied to the rows' scores.

    `allowed` is the largest loss; `room` is what the reference leaves of it.
    """

    def __init__(
        self,
        limit: Limit,
        values: Sequence[Any],
        labels: Sequence[Any] | None,
        custom: Custom | None,
        seed: int,
    ) -> None:
        self.limit, self.metric, self.seed, self.rows = (
            limit,
            metric_of(limit, custom),
            seed,
            len(values),
        )
        self.exact = limit.tolerance is not None  # no row may be lost
        self.agreement = labels is None or self.exact
        truth, whose = (
            (self.metric.truth, "an answer")
            if self.agreement
            else (self.metric.of_label, "a label or an answer")
        )
        try:
            self.truths = [
                truth(value) for value in (values if self.agreement or labels is None else labels)
            ]
            self.own = [
                self.metric.row(value, its) for value, its in zip(values, self.truths, strict=True)
            ]
        except ValueError as error:
            raise CliError(
                f"{limit.metric} does not fit {whose} of the model as it is: {error}. Give another"
                " --max-loss"
            ) from error
        self.base = self.own if limit.relative else [1.0] * self.rows
        self.score = self.metric.score(self.own)
        self.value = self.score([1] * self.rows)
        self.allowed = (
            limit.amount if limit.relative else 1 - limit.amount if self.metric.points else 0.0
        )
        self.room = self.allowed - self._lost(self.value, self.value)
        if self.value <= 0 if self.metric.points else self.value == 0 and limit.relative:
            why = (
                self._unlike_labels(values[0], labels[0])
                if labels and not self.agreement
                else "; correct --max-loss"
            )
            raise CliError(
                f"the model as it is has {limit.metric} {self.value:.5g}, so no loss can be"
                f" measured{why}"
            )
        if self.room <= 0 and not self.exact:
            raise CliError(
                f"the model as it is has {limit.metric} {self.value:.5g}: no form can keep"
                f" {limit.text}; change --max-loss"
            )

    def _unlike_labels(self, answer: Any, label: Any) -> str:
        best, its = self.metric.truth(answer), self.truths[0]
        if isinstance(best, frozenset):
            answer, label = (" or ".join(sorted(each)) for each in (best, its))
        else:
            answer, label = excerpt(answer), excerpt(label)
        return (
            f": for the first row the model says '{answer}', the file says '{label}'; correct"
            " --labels"
        )

    def row(self, position: int, value: Any, fails: bool) -> Any:
        truth = self.truths[position]
        try:
            return self.metric.missing(truth) if fails else self.metric.row(value, truth)
        except ValueError:
            return self.metric.missing(truth)

    def judge(self, rows: Sequence[Any], failed: int) -> tuple[tuple[bool, float], GuardVerdict]:
        """((Whether these rows keep the limit, what is left of it as a share of the room: below 0
        where it is not proven), the verdict).
        """
        needed = None
        if failed and self.metric.best is None:
            value, loss, point, least = 0.0, 1.0, 1.0, 1.0
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
            least = max(bound, point + unlike * share_bound(0, self.rows))
            text = self._in_words(value, rows, failed)
            if point > self.allowed:
                text += f", which breaks {self.limit.text}"
            elif least <= self.allowed or self.exact:
                text += f"; with 95 % confidence {self._sure(least)}"
            else:
                needed, about = self._needed(point, bound, unlike, rows)
                more = (
                    f"{about}{needed} rows, {needed - self.rows} more"
                    if needed < MANY
                    else "many millions of rows"
                )
                text += f"; 95 % confidence of {self.limit.text} needs {more}"
        passed = (point if self.exact else least) <= self.allowed
        verdict = GuardVerdict(
            passed=passed,
            metric=self.limit.metric,
            limit=self.limit.text,
            value=value,
            reference=self.value,
            loss=loss,
            loss_bound=loss + least - point,
            rows=self.rows,
            rows_needed=needed,
            text=text,
        )
        return (
            point <= self.allowed,
            1.0 if self.exact else (self.allowed - least) / self.room,
        ), verdict

    def hopeless(self, rows: Sequence[Any], failed: int) -> str | None:
        """By the best that the other rows can give."""
        if self.metric.best is None:
            return (
                f"{failed} rows failed, which {self.limit.metric} cannot score" if failed else None
            )
        whole = [*rows, *map(self.metric.best, self.truths[len(rows) :])]
        if max(self.point(whole), failed / self.rows) <= self.allowed:
            return None
        found = self._in_words(self.metric.score(rows)([1] * len(rows)), rows, failed)
        return f"{found}: {'it' if self.exact else self.limit.text} cannot be kept any more"

    def shortage(self) -> tuple[int, str] | None:
        if self.exact:
            return None
        if self.metric.kind == "share":
            most, bound = self.allowed, net_bound(0, self._pairs([True] * self.rows)[1], self.rows)
        else:
            most, bound = self.room if self.metric.whole else 1 / UNLIKE, share_bound(0, self.rows)
        if bound <= most:
            return None
        needed = rows_for(most)
        return needed, (
            f"{self.limit.text} needs at least {needed} held-out rows to be shown with 95 %"
            f" confidence; there are {self.rows}"
        )

    def point(self, rows: Sequence[Any]) -> float:
        """The loss of these rows."""
        if self.metric.kind == "share":
            losses, gains = self._pairs(rows)
            return (losses - gains) / self.rows
        return self._lost(self.value, self.metric.score(rows)([1] * self.rows))

    def _bounds(self, rows: Sequence[Any]) -> tuple[float, float, float]:
        """(Loss, bound, the loss of a row that is unlike all others)."""
        if self.metric.kind == "share":
            return self.point(rows), net_bound(*self._pairs(rows), self.rows), 0.0
        if self.metric.kind == "mean":
            lost = [own - row for own, row in zip(self.base, rows, strict=True)]
            point, bound = math.fsum(lost) / self.rows, mean_bound(lost)
        elif self.limit.relative and list(rows) == self.own:
            point = bound = 0.0  # of any rows
        else:
            score = self.metric.score(rows)
            point, bound = resampled_bound(
                lambda times: self._lost(self.score(times), score(times)), self.rows, self.seed
            )
        whole = bound <= point if self.metric.whole is None else self.metric.whole
        return point, bound, 1.0 if whole else UNLIKE * self.room

    def _pairs(self, rows: Sequence[Any]) -> tuple[int, int]:
        """How many rows are lost, and how many are gained."""
        pairs = list(zip(self.base, rows, strict=True))
        return sum(bool(own) and not row for own, row in pairs), sum(
            bool(row) and not own for own, row in pairs
        )

    def _lost(self, own: float, value: float) -> float:
        """What is compared with `allowed`: the change from the reference, from 1, or from the
        limit's value.
        """
        if self.limit.relative:
            return self._change(own, value)
        return 1 - value if self.metric.points else self._change(self.limit.amount, value)

    def _change(self, own: float, value: float) -> float:
        worse = value - own if self.metric.less else own - value
        return worse if self.metric.points else worse / (abs(own) or 1.0)

    def _needed(
        self, point: float, bound: float, unlike: float, rows: Sequence[Any]
    ) -> tuple[int, str]:
        """How many rows would show the limit; "about ", unless that is certain."""
        if self.metric.kind == "share" and self._pairs(rows) == (0, 0):
            count, about = rows_for(self.allowed), ""
        else:
            left = max(self.allowed - point, 1e-9)
            spread = math.ceil(
                self.rows * ((bound - point) / left) ** 2
            )  # the interval shrinks with the root of their number
            count, about = max(spread, rows_for(min(left / unlike, 1.0)) if unlike else 0), "about "
        return max(count, self.rows + 1), about

    def _sure(self, bound: float) -> str:
        if self.exact:
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

    def _in_words(self, value: float, rows: Sequence[Any], failed: int) -> str:
        name = self.limit.text if self.exact else self.limit.metric
        if self.metric.kind == "share":
            verb = "holds for" if self.exact else "agreed on" if self.agreement else "is right on"
            text = f"{name} {verb} {sum(map(bool, rows))} of {len(rows)} rows"
            text += (
                ""
                if self.agreement
                else f", the reference on {sum(map(bool, self.own[: len(rows)]))}"
            )
        else:
            own = (
                ""
                if self.agreement and self.metric.points
                else f", of the reference {self.value:.5g}"
            )
            text = f"{name} is {value:.5g} on {len(rows)} rows{own}"
        return f"{text}; {failed} failed" if failed else text


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
