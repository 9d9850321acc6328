"""Names that tell what nobody else should see: of headers, and of the parameters of a query."""

from __future__ import annotations

import re

_LETS_IN = re.compile(
    r"auth|cookie|token|secret|pass(?:w|phrase|code)|credential|session|signature|jwt|csrf|oidc|"
    r"(?:api|access|private|license)[-_]?key|(?:^|[-_])(?:key|pass|sig)(?:$|[-_])|^x-amz",
    re.IGNORECASE,
)
_TELLS_WHO = re.compile(
    r"forwarded|real-ip|client[-_]?ip|^cf-|user(?!-agent)|principal|e?mail|identity|^from$|^referer$",
    re.IGNORECASE,
)


def lets_in(name: str) -> bool:
    """Whether its value may be somebody's right to ask."""
    return _LETS_IN.search(name) is not None


def tells_who(name: str) -> bool:
    """Whether its value may say who asks."""
    return _TELLS_WHO.search(name) is not None
