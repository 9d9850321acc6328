"""The diagnosis of a failed start: rules for the platform's message and the container's log.

`diagnose` is a pure function. Rules for lines of the log precede rules for the platform's message,
because the platform often reports only that nothing answered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_cli.deploy.engine.shapes import read_shapes


class DiagnosisRule(NamedTuple):
    pattern: re.Pattern[str]
    cause: str  # `{0}` is the group of the pattern
    way: str  # advice for the user
    image: bool = False  # whether the image is at fault


def rules(group: str) -> list[DiagnosisRule]:
    entries = read_shapes(Path(__file__).with_name("diagnosis.yaml"))[group]
    return [
        DiagnosisRule(**{**rule, "pattern": re.compile(rule["pattern"], re.IGNORECASE)})
        for rule in entries
    ]


SILENT = (
    "The container wrote no log line: the image was not started, or the role does not allow logs."
    " The role needs logs:CreateLogStream and logs:PutLogEvents; check the image's ENTRYPOINT and"
    " platform as well."
)
MAX_CAUSES = 3  # further causes are likely to follow from the first


class Diagnosis(NamedTuple):
    cause: str
    way: str
    line: str  # the line that shows the cause

    def __str__(self) -> str:
        return f"{self.cause[:1].upper()}{self.cause[1:]}. {self.way}."


def diagnose(reason: str, lines: Sequence[str]) -> list[Diagnosis]:
    """Return the likely causes; those that the log shows come first."""
    causes: dict[str, Diagnosis] = {}
    line_rules, platform_rules = rules("lines"), rules("said")
    _match_rules(causes, rules("engine"), lines)
    # A container engine reports faults of this machine, unless its message names a program of the
    # image. The platform's rules would misread such a message, so they do not apply.
    if causes:
        image_causes: dict[str, Diagnosis] = {}
        _match_rules(image_causes, [rule for rule in line_rules if rule.image], lines)
        return list((image_causes or causes).values())
    _match_rules(causes, line_rules, lines)
    _match_rules(causes, line_rules + platform_rules, [reason])
    _match_rules(causes, platform_rules, lines)
    for group, texts in (("not loaded", lines), ("no ping", [reason])):
        if not causes:
            _match_rules(causes, rules(group), texts)
    return list(causes.values())[:MAX_CAUSES]


def _match_rules(
    causes: dict[str, Diagnosis], rules: Sequence[DiagnosisRule], texts: Sequence[str]
) -> None:
    for rule in rules:
        for text in texts:
            match = rule.pattern.search(text)
            if match is not None and rule.way not in causes:
                detail = next((group for group in match.groups() if group), "")
                causes[rule.way] = Diagnosis(
                    rule.cause.format(detail.rstrip(". ")), rule.way, text.strip()
                )
