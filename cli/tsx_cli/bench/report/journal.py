"""The journal of a run, from which `--resume` continues; each result is a line of JSON.

{"kind": "begin", "format": 1, "asked": {...}, "sha256": ..., "fingerprint": ..., "started": ...}
{"kind": "curve", "curve": {...}}
{"kind": "trial", "at": 3, "trial": {...}}             all fields except its points
{"kind": "point", "at": 3, "number": 0, "point": {...}}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tsx_cli.bench.load.results import FORMAT, Curve, Point, Trial
from tsx_cli.common.run_directory import JournaledRun, JournalFile, read_journal_file


class Journal(JournalFile):
    command, format = "tsx bench", FORMAT

    def write_curve(self, curve: Curve) -> None:
        self.write("curve", curve=curve.model_dump(mode="json"))

    def write_trial(self, position: int, trial: Trial) -> None:
        self.write("trial", at=position, trial=trial.model_dump(mode="json", exclude={"points"}))

    def write_point(self, position: int, point_index: int, point: Point) -> None:
        self.write("point", at=position, number=point_index, point=point.model_dump(mode="json"))


@dataclass
class PastRun(JournaledRun):
    """The content of a journal."""

    curves: list[Curve] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)


def read_journal(directory: Path) -> PastRun:
    """Read the journal of a run.

    Raises:
        CliError: There is nothing to resume.
    """
    return read_journal_file(directory, Journal, PastRun, _add)


def _add(entry: dict[str, Any], past: PastRun) -> None:
    if entry["kind"] == "curve":
        past.curves.append(Curve.model_validate(entry["curve"]))
    elif entry["kind"] == "trial":
        points = past.trials[entry["at"]].points if entry["at"] < len(past.trials) else []
        trial = Trial.model_validate(entry["trial"] | {"points": points})
        past.trials[entry["at"] : entry["at"] + 1] = [trial]
    elif entry["kind"] == "point":
        past.trials[entry["at"]].points[entry["number"] : entry["number"] + 1] = [
            Point.model_validate(entry["point"])
        ]
