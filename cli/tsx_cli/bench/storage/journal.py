"""The journal of a run, a line of JSON per result: `--resume` continues from it.

    {"kind": "begin", "format": 1, "asked": {...}, "sha256": ..., "fingerprint": ..., "started": ...}
    {"kind": "curve", "curve": {...}}
    {"kind": "trial", "at": 3, "trial": {...}}             all of it but its points
    {"kind": "point", "at": 3, "number": 0, "point": {...}}

Later lines take the place of earlier ones; a line that was cut short by the end of the process is passed over. One run at a time has it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import private_opener
from tsx_cli.bench.model.results import FORMAT, Curve, Point, Trial
from tsx_cli.common.failure import CliError

NAME = "journal.jsonl"


class Journal:
    def __init__(self, directory: Path, *, new: bool = False) -> None:
        """Appends to the directory's journal, or begins it where the run is `new`. Raises OSError, and CliError where a run has it."""
        self._path = directory / NAME
        self._file = open(self._path, "a", encoding="utf-8", opener=private_opener)  # noqa: SIM115  # it is closed with the journal
        self._lock = FileLock(self._path)
        if not self._lock.own(wait=False) or (new and has_run(directory)):
            self.close()
            raise CliError(
                f"another run of tsx bench writes into '{directory}'; wait until it ends, or name another directory with --output"
            )
        _cut(self._path, whole=not new)

    def begin(self, asked: dict[str, Any], **entry: Any) -> None:
        self._write({"kind": "begin", "format": FORMAT, "asked": asked, **entry})

    def curve(self, curve: Curve) -> None:
        self._write({"kind": "curve", "curve": curve.model_dump(mode="json")})

    def trial(self, at: int, trial: Trial) -> None:
        self._write({"kind": "trial", "at": at, "trial": trial.model_dump(mode="json", exclude={"points"})})

    def point(self, at: int, number: int, point: Point) -> None:
        self._write({"kind": "point", "at": at, "number": number, "point": point.model_dump(mode="json")})

    def close(self) -> None:
        with suppress(OSError):  # that it could not be written was reported
            self._file.close()
        self._lock.close()

    def _write(self, value: dict[str, Any]) -> None:
        """Raises CliError."""
        try:
            self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            message = f"'{self._path}' cannot be written ({error.strerror or error}), so the run ends here"
            raise CliError(f"{message}; free some disk space, and continue with tsx bench --resume {self._path.parent}") from error


def has_run(directory: Path) -> bool:
    """Whether there is anything to go on from: a run that found nothing, since its input was refused, is none."""
    try:
        with (directory / NAME).open("rb") as lines:
            return len(list(islice(lines, 2))) > 1
    except OSError:
        return False


@dataclass
class PastRun:
    """The content of a journal."""

    asked: dict[str, Any]
    sha256: str | None
    fingerprint: str
    started: str
    curves: list[Curve] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)


def read_journal(directory: Path) -> PastRun:
    """Raises CliError where there is none to go on from."""
    path = directory / NAME
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CliError(f"--resume: '{path}' cannot be read ({error.strerror}); name the directory of a run of tsx bench") from error
    lines = text.removesuffix("\n").split("\n") if text else []  # and nowhere else: JSON may hold what str.splitlines takes for an end
    past: PastRun | None = None
    for number, line in enumerate(lines, 1):
        try:
            past = _read(json.loads(line), past)
        except (ValueError, KeyError, TypeError, IndexError, ValidationError, RecursionError) as error:
            if number == len(lines) and past is not None:
                break
            raise CliError(f"'{path}', line {number}, is damaged ({type(error).__name__}); start a new run without --resume") from error
    if past is None:
        raise CliError(f"'{path}' is empty; start a new run without --resume")
    return past


def _read(entry: dict[str, Any], past: PastRun | None) -> PastRun:
    if past is None:
        if entry["kind"] != "begin" or entry["format"] != FORMAT:
            raise ValueError(entry["kind"])
        return PastRun(entry["asked"], entry["sha256"], entry["fingerprint"], entry["started"])
    if entry["kind"] == "curve":
        past.curves.append(Curve.model_validate(entry["curve"]))
    elif entry["kind"] == "trial":
        points = past.trials[entry["at"]].points if entry["at"] < len(past.trials) else []
        trial = Trial.model_validate(entry["trial"] | {"points": points})
        past.trials[entry["at"] : entry["at"] + 1] = [trial]
    elif entry["kind"] == "point":
        past.trials[entry["at"]].points[entry["number"] : entry["number"] + 1] = [Point.model_validate(entry["point"])]
    return past


def _cut(path: Path, *, whole: bool) -> None:
    """Without a last line that has no end, or without any."""
    content = path.read_bytes()
    kept = content.rfind(b"\n") + 1 if whole else 0
    if kept < len(content):
        with path.open("r+b") as file:
            file.truncate(kept)
