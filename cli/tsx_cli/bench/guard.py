"""Whether a configuration answers as the archive does as it is, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tsx_cli.bench.payloads import Payload
from tsx_cli.bench.results import Accuracy
from tsx_cli.bench.trial import Candidate
from tsx_cli.compare import Reply, difference, reason
from tsx_cli.failure import CliError

COMPARED = 16  # inputs


class Guard:
    """`note` says why nothing is compared, where that is so."""

    def __init__(self, payloads: Sequence[Payload], tolerance: float) -> None:
        self._payloads = payloads[:COMPARED]
        self._tolerance = tolerance
        self._reference: list[Reply] = []
        self.note: str | None = None

    @property
    def ready(self) -> bool:
        return bool(self._reference) or self.note is not None

    def learn(self, candidate: Candidate) -> None:
        """The answers of the archive as it is. Raises TrialFailed, and CliError where it refuses an input."""
        first, again = (candidate.answers(self._payloads, 1) for _ in range(2))
        refused = next((reply for reply in first if reply.status >= 400), None)
        if refused is not None:
            said = reason(refused.body)
            raise CliError(
                f"{candidate.target.name} as it is answers an input with {refused.status}: {said}. Correct --input or --content-type"
            )
        if any(difference(one, other, self._tolerance) for one, other in zip(first, again, strict=True)):
            self.note = "answers are not compared: the archive as it is answers the same request differently each time"
        else:
            self._reference = first

    def compare(self, candidate: Candidate) -> Accuracy | None:
        """None where there is nothing to compare with. Raises TrialFailed."""
        if not self._reference:
            return None
        count = len(self._reference)
        replies = candidate.answers(self._payloads, candidate.configuration.batch_size)
        found = [difference(self._reference[at % count], reply, self._tolerance) for at, reply in enumerate(replies)]
        different = [text for text in found if text is not None]
        return Accuracy(same=not different, compared=len(replies), different=len(different), worst=next(iter(different), None))
