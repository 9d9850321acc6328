"""The differences that are meant, each with its name, as docs/torchserve.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.differential.cases import Case

# The case, what differs (see `compare.differences`), their value, ours, and both whole answers.
Covers = Callable[[Case, str, Any, Any, Any], bool]


class Difference(NamedTuple):
    name: str
    why: str
    covers: Covers


ACCEPTED: list[Difference] = []
