"""How far a run is, kept beside its output, so that the same command goes on there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tsx_cli.batch.rows import Position
from tsx_cli.batch.stores import JOURNAL, OutputStore
from tsx_cli.common.failure import CliError

FORMAT = 1
CHANGED = {
    "model": "the model",
    "reader": "the input or the way it is read",
    "writer": "the format of the output",
}


@dataclass
class Checkpoint:
    """`rows` are in the output, in `parts` parts; the next one is read from `position`."""

    rows: int = 0
    errors: int = 0
    parts: int = 0
    seconds: float = 0.0  # of all runs
    complete: bool = False  # all rows are in the parts
    position: Position = field(default_factory=Position)


class BatchJournal:
    """Without a store (the output is a stream) nothing is kept."""

    def __init__(
        self, store: OutputStore | None, fingerprint: dict[str, Any], *, restart: bool = False
    ) -> None:
        """`fingerprint`: JSON, by the names of CHANGED. Raises CliError where the output is there,
        or belongs to other rows.
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
        """It is on the disk on return."""
        self.progress = progress
        if self._store is not None:
            self._store.put(
                JOURNAL,
                json.dumps(
                    {"format": FORMAT, "fingerprint": self._fingerprint, **asdict(progress)}
                ).encode(),
            )

    def close(self, *, finished: bool) -> None:
        """`finished`: the output is whole, so that nothing is left to go on with."""
        if self._store is not None:
            try:
                if finished:
                    self._store.clear()
            finally:
                self._store.close()

    def _begin(self, store: OutputStore, restart: bool) -> None:
        kept = store.read(JOURNAL)
        if kept is not None and not restart:
            self.progress = self._parse(store.output, kept)
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

    def _parse(self, output: str, kept: bytes) -> Checkpoint:
        advice = "; start over with --restart, or name another output"
        try:
            entry = json.loads(kept)
            if entry.pop("format") != FORMAT:
                raise ValueError("it is of another version of tsx")
            before, position = entry.pop("fingerprint"), Position(*entry.pop("position"))
            progress = Checkpoint(**entry, position=position)
            changed = [
                words
                for key, words in CHANGED.items()
                if before.get(key) != self._fingerprint.get(key)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CliError(
                f"the journal of the unfinished run that writes {output} cannot be read"
                f" ({error}){advice}"
            ) from error
        if changed:
            raise CliError(
                f"{output} is unfinished, and {' and '.join(changed)} changed since the run"
                f" started{advice}"
            )
        return progress
