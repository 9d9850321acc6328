"""Names of headers and of parameters that tell who asks. Those of secrets are in `redaction.py`."""

from __future__ import annotations

import re

_TELLS_WHO = re.compile(
    r"forwarded|real-ip|client[-_]?ip|^cf-|user(?!-agent)|principal|e?mail|identity|^from$|^referer$",
    re.IGNORECASE,
)


def is_identifying_header(name: str) -> bool:
    """Whether its value may say who asks."""
    return _TELLS_WHO.search(name) is not None
