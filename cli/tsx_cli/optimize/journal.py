"""The journal of a run of `tsx optimize`, from which `--resume` continues.

Each result is a line of JSON:
{"kind": "begin", "format": 1, "asked": {...}, "sha256": ..., "inputs": ..., "fingerprint": ...,
"started": ...}
{"kind": "form", "form": {...}}                        the result of a form
{"kind": "written", "sha256": ...}                     the archive with the kept forms
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tsx_cli.bench.load.results import Part
from tsx_cli.common.failure import CliError
from tsx_cli.common.run_directory import JournaledRun, JournalFile, read_journal_file
from tsx_cli.optimize.results import FORMAT, FormResult


class OptimizeJournal(JournalFile):
    command, format = "tsx optimize", FORMAT

    def survey(self, survey: Survey) -> None:
        self.write("survey", survey=survey.model_dump(mode="json"))

    def form(self, form: FormResult) -> None:
        self.write("form", form=form.model_dump(mode="json"))

    def written(self, sha256: str | None) -> None:
        self.write("written", sha256=sha256)


class Survey(Part):
    """The forms that can be built, and the limit by which they are judged."""

    applies: dict[str, str | None]  # why a form cannot be built, or None, by name
    labels: dict[str, str]
    limit: str  # the limit of the loss
    rows: int  # held-out rows that are compared


@dataclass
class PastOptimization(JournaledRun):
    """The content of a journal."""

    inputs: str = ""  # digest of the inputs, their labels and their division
    survey: Survey | None = None
    forms: dict[str, FormResult] = field(default_factory=dict)

    def check_inputs(self, digest: str) -> None:
        """Check that the inputs are the same as in the earlier run.

        Otherwise an input that calibrated a form might also test it.

        Raises:
            CliError: The inputs or labels have changed.
        """
        if self.inputs != digest:
            raise CliError(
                "--resume: the inputs or their labels have changed since that run started; start a"
                " new run without --resume"
            )


def read_optimize_journal(directory: Path) -> PastOptimization:
    """Read the journal of a run.

    Raises:
        CliError: There is nothing to resume.
    """
    return read_journal_file(directory, OptimizeJournal, PastOptimization, _add)


def _add(entry: dict[str, Any], past: PastOptimization) -> None:
    if entry["kind"] == "survey":
        past.survey = Survey.model_validate(entry["survey"])
    elif entry["kind"] == "form":
        form = FormResult.model_validate(entry["form"])
        past.forms[form.name] = form
    elif entry["kind"] == "written":
        past.sha256 = entry["sha256"]
