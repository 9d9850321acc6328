"""The accuracy guard of `tsx optimize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsx_cli.optimize.guard.limits import Custom, Limit
from tsx_cli.optimize.results import GuardVerdict
from tsx_runtime.plugins import ComparedAnswer


class Guard:
    """Judges forms by the reference's answers for the held-out rows, and by labels where there are some.

    `reference` and `labels` are in the order of the rows; so are the answers of a form.
    """

    def __init__(
        self,
        reference: Sequence[ComparedAnswer],
        limits: Sequence[Limit] = (),  # none: by the form of the answers
        labels: Sequence[Any] | None = None,
        custom: Custom | None = None,
        seed: int = 0,
    ) -> None:
        """Raises CliError."""
        self.limit = ""  # in words
        self.shortage: str | None = None  # why no form can pass: there are too few rows

    def judge(self, answers: Sequence[ComparedAnswer]) -> GuardVerdict:
        raise NotImplementedError

    def hopeless(self, answers: Sequence[ComparedAnswer]) -> str | None:
        """Why a form with these answers for the first rows cannot pass, whatever it answers for the others."""
        raise NotImplementedError
