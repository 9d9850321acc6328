"""The journal in an output's work directory, from which the same command continues a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tsx_cli.batch.rows import Position
from tsx_cli.batch.stores import JOURNAL, OutputStore
from tsx_cli.common.failure import CliError

FORMAT_VERSION = 1
FINGERPRINT_LABELS = {
    "model": "the model",
    "reader": "the input or the way it is read",
    "writer": "the format of the output",
}


@dataclass
class Checkpoint:
    """The progress of a run: the rows and parts of its output, and the position of the next row."""

    rows: int = 0
    errors: int = 0
    parts: int = 0
    seconds: float = 0.0  # including interrupted runs
    complete: bool = False  # whether all rows are in the parts
    position: Position = field(default_factory=Position)


class BatchJournal:
    """The journal of a run. It stores nothing without a store, when the output is a stream."""

    def __init__(
        self, store: OutputStore | None, fingerprint: dict[str, Any], *, restart: bool = False
    ) -> None:
        """Lock the store, and read the progress of an unfinished run.

        Args:
            store: The output's store.
            fingerprint: JSON values whose keys are those of FINGERPRINT_LABELS.
            restart: Whether to discard an unfinished run or an existing output.

        Raises:
            CliError: The output exists, or belongs to a run with another fingerprint.
        """
        self._store, self._fingerprint = store, json.loads(json.dumps(fingerprint))
        self.progress = Checkpoint()
        if store is not None:
            store.lock()
            try:
                self._begin(store, restart)
            except BaseException:
                store.close()
                raise

    def commit(self, progress: Checkpoint) -> None:
        """Store the progress; it is on the disk on return."""
        self.progress = progress
        if self._store is not None:
            self._store.put(
                JOURNAL,
                json.dumps(
                    {"format": FORMAT_VERSION, "fingerprint": self._fingerprint, **asdict(progress)}
                ).encode(),
            )

    def close(self, *, finished: bool) -> None:
        """Release the output; if it is `finished`, remove the journal."""
        if self._store is not None:
            try:
                if finished:
                    self._store.clear()
            finally:
                self._store.close()

    def _begin(self, store: OutputStore, restart: bool) -> None:
        content = store.read(JOURNAL)
        if content is not None and not restart:
            self.progress = self._parse(store.output, content)
            return
        store.clear()
        if store.exists():
            if store.output.endswith("/"):
                raise CliError(
                    f"{store.output} is not empty; remove what is in it, or name another directory"
                    " with -o"
                )
            if not restart:
                raise CliError(
                    f"{store.output} exists already, and no unfinished run belongs to it; --restart"
                    " replaces it"
                )

    def _parse(self, output: str, content: bytes) -> Checkpoint:
        advice = "; start over with --restart, or name another output"
        try:
            entry = json.loads(content)
            if entry.pop("format") != FORMAT_VERSION:
                raise ValueError("it is of another version of tsx")
            earlier_fingerprint, position = (
                entry.pop("fingerprint"),
                Position(*entry.pop("position")),
            )
            progress = Checkpoint(**entry, position=position)
            changed_labels = [
                label
                for key, label in FINGERPRINT_LABELS.items()
                if earlier_fingerprint.get(key) != self._fingerprint.get(key)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CliError(
                f"the journal of the unfinished run that writes {output} cannot be read"
                f" ({error}){advice}"
            ) from error
        if changed_labels:
            raise CliError(
                f"{output} is unfinished, and {' and '.join(changed_labels)} changed since the run"
                f" started{advice}"
            )
        return progress
