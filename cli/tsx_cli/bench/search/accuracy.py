"""The accuracy guard compares the answers of a configuration and of the unchanged archive.

Answers are compared one request at a time, like the answers of a shadow model
(`core/comparison/comparison.py`). First the archive is compared with itself: a model that answers
the same request differently each time cannot be compared. A form that `tsx optimize` has accepted
may differ here, because a tolerance for numbers would refuse int8, whose labels are right. It must
still answer every request that the archive answers.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tsx_archiver.metadata.forms import FormRecord
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import Accuracy
from tsx_cli.bench.search.trial import RunningCandidate
from tsx_cli.common.client import error_text
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.core.comparison.comparison import TOLERANCES, compare
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.settings.traffic_policy import Compare

RTOL, ATOL = TOLERANCES["bf16"]  # the default, as configurations may compute in bf16
MAX_COMPARED_INPUTS = 32
REFERENCE_TIMEOUT_S = 3.0  # After it no further inputs are sent, to leave time for measurements.

_PART = re.compile(r"\s*(rtol|atol)\s*=\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*", re.IGNORECASE)


def parse_tolerance(tolerance: str | None = None, same_top: int | None = None) -> Compare:
    """Parse `rtol=1e-2,atol=1e-3` or `exact`, or take the number of labels that must be the same.

    Raises:
        UsageError: The options do not fit together, or the text is not a tolerance.
    """
    if same_top is not None:
        if tolerance is not None:
            raise UsageError("--tolerance and --same-top cannot be combined; give one of them")
        if not 1 <= same_top <= 1000:
            raise UsageError(
                f"--same-top {same_top}: it is how many of the best labels must be the same, 1 to"
                " 1000"
            )
        return Compare(kind="top-k", k=same_top)
    if tolerance is None:
        return Compare(kind="numeric", rtol=RTOL, atol=ATOL)
    if tolerance.strip() == "exact":
        return Compare(kind="exact")
    tolerances: dict[str, float] = {}
    for part in tolerance.split(","):
        match = _PART.fullmatch(part)
        try:
            value = float(match[2]) if match is not None else None
        except ValueError:
            value = None
        if (
            match is None
            or value is None
            or not math.isfinite(value)
            or match[1].lower() in tolerances
        ):
            raise UsageError(
                f"--tolerance: '{part.strip()}' is not a tolerance; use rtol=1e-2,atol=1e-3"
                " (relative, absolute or both), or exact"
            )
        tolerances[match[1].lower()] = value
    return Compare(
        kind="numeric", rtol=tolerances.get("rtol", 0.0), atol=tolerances.get("atol", 0.0)
    )


class AccuracyGuard:
    """A comparison with the unchanged archive. `note` is the reason if nothing is compared."""

    def __init__(
        self,
        payloads: Sequence[Payload],
        tolerance: Compare,
        clock: Callable[[], float] = time.monotonic,
        verdicts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Make a guard with this tolerance.

        `verdicts` are texts about the forms that `tsx optimize` accepted, by the name of the form.
        """
        self._payloads = payloads[:MAX_COMPARED_INPUTS]
        self._tolerance = tolerance
        self._clock = clock
        self._verdicts = verdicts
        self._reference: list[ComparedAnswer] = []
        self.note: str | None = None

    def learn(self, archive: RunningCandidate) -> None:
        """Record the archive's answers. If the model is slow, only some of the inputs are sent.

        Raises:
            CliError: The archive refuses an input.
        """
        end, reference = self._clock() + REFERENCE_TIMEOUT_S, list[ComparedAnswer]()
        for payload in self._payloads:
            reference += archive.answers([payload], 1)
            if reference[-1].status >= 400:
                problem = (
                    f"the archive as it is answers an input with {reference[-1].status}:"
                    f" {error_text(reference[-1].body).rstrip('.')}"
                )
                raise CliError(
                    f"{problem}. Correct"
                    f" {'the handler, or ' if reference[-1].status >= 500 else ''}--input or"
                    " --content-type"
                )
            if self._clock() > end:
                break
        self._payloads = self._payloads[: len(reference)]
        self_comparison = compare_answers(
            reference, archive.answers(self._payloads, 1), self._tolerance, self._payloads
        )
        if self_comparison.same:
            self._reference = reference
        else:
            self.note = (
                "answers are not compared: the archive as it is answers the same request"
                f" differently each time ({self_comparison.worst})"
            )

    def compare(self, candidate: RunningCandidate) -> Accuracy | None:
        """Compare a configuration with the archive; return None if there is no reference."""
        if not self._reference:
            return None
        answers = candidate.answers(self._payloads, candidate.configuration.batch_size)
        accuracy = compare_answers(self._reference, answers, self._tolerance, self._payloads)
        if not accuracy.same and all(answer.status < 400 for answer in answers):
            accuracy.accepted = self._verdicts.get(candidate.configuration.form or "")
        return accuracy


def verdicts_of(forms: Sequence[FormRecord]) -> dict[str, str]:
    """Return a text about each form that `tsx optimize` accepted, by the name of the form.

    Values are checked, because anybody may have written the archive.
    """
    verdicts = {}
    for form in forms:
        guard = form.measured.get("guard")
        if isinstance(guard, Mapping) and guard.get("passed") is True:
            verdicts[form.name] = (
                f"tsx optimize: {guard.get('limit')} held for {guard.get('rows')} inputs"
            )
    return verdicts


def compare_answers(
    reference: Sequence[ComparedAnswer],
    answers: Sequence[ComparedAnswer],
    tolerance: Compare,
    payloads: Sequence[Payload] = (),
) -> Accuracy:
    """Compare each answer with the reference for the same input.

    There may be more answers than references; inputs are then repeated in order.
    """
    different, worst = 0, None
    for index, answer in enumerate(answers):
        input_index = index % len(reference)
        request = payloads[input_index].body if input_index < len(payloads) else b""
        difference = compare(tolerance, request, reference[input_index], answer).difference
        if difference is not None:
            different += 1
            worst = (
                worst
                or f"input {input_index + 1}: {difference.between('archive', 'this configuration')}"
            )
    return Accuracy(same=not different, compared=len(answers), different=different, worst=worst)
