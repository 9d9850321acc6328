"""Redacts secrets in displayed text: user names and passwords in URLs, and the values of secret
query parameters.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote_plus

_TELLS_WHO = re.compile(
    r"forwarded|real-ip|client[-_]?ip|^cf-|user(?!-agent)|principal|e?mail|identity|^from$|^referer$",
    re.IGNORECASE,
)
HIDDEN = "***"
_SECRET = re.compile(
    r"auth|cookie|token|secret|pass(?:w|phrase|code)|pwd|credential|session|signature|jwt|csrf|oidc|"
    r"(?:api|access|private|license)[-_]?key|(?:^|[-_])(?:key|pass|sig)(?:$|[-_])|^x-amz",
    re.IGNORECASE,
)
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#\"'<>]*@")
_PARAMETER = re.compile(r"([?&;]|&amp;)([^\s?&;=#\"'<>]{1,200})=([^\s&;#\"'<>]+)")


def is_secret_header(name: str) -> bool:
    """Whether the value of a header or parameter of this name may be a credential."""
    return _SECRET.search(name) is not None


def redacted(text: str) -> str:
    """The text without the secrets of the URLs in it.

    One without `=` and `@` costs next to nothing.
    """
    if "@" in text and "://" in text:
        text = _USER.sub(rf"\1{HIDDEN}@", text)
    if "=" in text and ("?" in text or "&" in text):
        text = _PARAMETER.sub(_parameter, text)
    return text


def redacted_values(value: Any) -> Any:
    """The same of every text in a nested value."""
    if isinstance(value, dict):
        return {key: redacted_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(each) for each in value]
    return redacted(value) if isinstance(value, str) else value


def _parameter(found: re.Match[str]) -> str:
    name = unquote_plus(unquote_plus(found[2]))
    return f"{found[1]}{found[2]}={HIDDEN}" if is_secret_header(name) else found[0]


def is_identifying_header(name: str) -> bool:
    """True if a header of this name may identify the client."""
    return _TELLS_WHO.search(name) is not None
