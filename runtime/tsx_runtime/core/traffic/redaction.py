"""Names of headers and of parameters that identify the client. Those of secrets are in `shared/redaction.py`."""

from __future__ import annotations

import re

_TELLS_WHO = re.compile(
    r"forwarded|real-ip|client[-_]?ip|^cf-|user(?!-agent)|principal|e?mail|identity|^from$|^referer$",
    re.IGNORECASE,
)


def is_identifying_header(name: str) -> bool:
    """True if a header of this name may identify the client."""
    return _TELLS_WHO.search(name) is not None
