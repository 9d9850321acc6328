"""Diagnoses a failed start: rules over the platform's message and the container's log, with what to
do.

A pure function. The first rule that knows a line of the log goes before those that only know the
platform's sentence, which often says no more than that nothing answered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_cli.deploy.engine.shapes import shapes


class DiagnosisRule(NamedTuple):
    pattern: re.Pattern[str]
    cause: str  # `{0}` is what the pattern's group found
    way: str
    image: bool = False  # whether the image is at fault


def rules(group: str) -> list[DiagnosisRule]:
    found = shapes(Path(__file__).with_name("diagnosis.yaml"))[group]
    return [
        DiagnosisRule(**{**rule, "pattern": re.compile(rule["pattern"], re.IGNORECASE)})
        for rule in found
    ]


SILENT = (
    "The container wrote no log line: the image was not started, or the role does not allow logs."
    " The role needs logs:CreateLogStream and logs:PutLogEvents; check the image's ENTRYPOINT and"
    " platform as well."
)
MOST_CAUSES = 3  # more are likely to follow from the first ones


class Diagnosis(NamedTuple):
    cause: str
    way: str
    line: str  # that gave it away

    def __str__(self) -> str:
        return f"{self.cause[:1].upper()}{self.cause[1:]}. {self.way}."


def diagnose(reason: str, lines: Sequence[str]) -> list[Diagnosis]:
    """The likely causes, what the log shows first; none where no rule knows anything of it."""
    found: dict[str, Diagnosis] = {}
    of_lines, of_platform = rules("lines"), rules("said")
    _look(found, rules("engine"), lines)
    if found:  # an engine's message is about this machine, unless it names the image's own program
        of_image: dict[str, Diagnosis] = {}
        _look(of_image, [rule for rule in of_lines if rule.image], lines)
        return list((of_image or found).values())
    _look(found, of_lines, lines)
    _look(found, of_lines + of_platform, [reason])
    _look(found, of_platform, lines)
    for last, texts in (("not loaded", lines), ("no ping", [reason])):
        if not found:
            _look(found, rules(last), texts)
    return list(found.values())[:MOST_CAUSES]


def _look(
    found: dict[str, Diagnosis], rules: Sequence[DiagnosisRule], texts: Sequence[str]
) -> None:
    for rule in rules:
        for text in texts:
            match = rule.pattern.search(text)
            if match is not None and rule.way not in found:
                what = next((group for group in match.groups() if group), "")
                found[rule.way] = Diagnosis(
                    rule.cause.format(what.rstrip(". ")), rule.way, text.strip()
                )
