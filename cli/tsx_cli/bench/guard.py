"""Whether a configuration's server answers as the archive's does as it is, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tsx_cli.bench.accuracy import COMPARED, compare_answers
from tsx_cli.bench.payloads import Payload
from tsx_cli.bench.results import Accuracy
from tsx_cli.bench.trial import Candidate
from tsx_cli.compare import reason
from tsx_cli.failure import CliError
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.traffic import Compare


class Guard:
    """`note` says why nothing is compared, where that is so."""

    def __init__(self, payloads: Sequence[Payload], tolerance: Compare) -> None:
        self._payloads = payloads[:COMPARED]
        self._tolerance = tolerance
        self._reference: list[ComparedAnswer] = []
        self.note: str | None = None

    def learn(self, candidate: Candidate) -> None:
        """The answers of the archive as it is. Raises TrialFailed, and CliError where it refuses an input."""
        first, again = (candidate.answers(self._payloads, 1) for _ in range(2))
        refused = next((answer for answer in first if answer.status >= 400), None)
        if refused is not None:
            said = f"{candidate.target.name} as it is answers an input with {refused.status}: {reason(refused.body)}"
            raise CliError(f"{said}. Correct --input or --content-type")
        same = compare_answers(first, again, self._tolerance, self._payloads)
        if same.same:
            self._reference = first
        else:
            self.note = f"answers are not compared: the archive as it is answers the same request differently each time ({same.worst})"

    def compare(self, candidate: Candidate) -> Accuracy | None:
        """None where there is nothing to compare with. Raises TrialFailed."""
        if not self._reference:
            return None
        answers = candidate.answers(self._payloads, candidate.configuration.batch_size)
        return compare_answers(self._reference, answers, self._tolerance, self._payloads)
