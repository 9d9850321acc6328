"""Hides secret values in plans, which end up in CI logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(r"token|secret|passw(?:or)?d|credential|api_?key|access_?key|private_?key", re.IGNORECASE)
_OPEN = frozenset({"", "true", "false"})  # a switch, such as TSX_DISABLE_TOKEN_AUTHORIZATION
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def hidden(value: Any, name: str = "") -> Any:
    """`value` without the texts of variables whose names say that they are secret, wherever in it they stand.

    A variable is a key with its value, a `{"name", "value"}` of Kubernetes, or a NAME=VALUE of docker.
    """
    if isinstance(value, Mapping):
        label = value.get("name")
        return {key: hidden(each, label if key == "value" and isinstance(label, str) else key) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(each) for each in value]
    if not isinstance(value, str) or value in _OPEN:
        return value
    assigned = _ASSIGNED.fullmatch(value)
    if assigned is not None and not name:
        return f"{assigned[1]}={hidden(assigned[2], assigned[1])}"
    return HIDDEN if _SECRET.search(name) else value
