"""Redaction of secrets in displayed text: credentials in URLs, and secret query parameters."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote_plus

_IDENTIFYING = re.compile(
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
    """Tell whether a header or parameter of this name may contain a credential."""
    return _SECRET.search(name) is not None


def redacted(text: str) -> str:
    """Replace the secrets in the URLs of a text."""
    if "@" in text and "://" in text:
        text = _USER.sub(rf"\1{HIDDEN}@", text)
    if "=" in text and ("?" in text or "&" in text):
        text = _PARAMETER.sub(_parameter, text)
    return text


def redacted_values(value: Any) -> Any:
    """Replace the secrets in every text of a nested value."""
    if isinstance(value, dict):
        return {key: redacted_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


def _parameter(match: re.Match[str]) -> str:
    name = unquote_plus(unquote_plus(match[2]))
    return f"{match[1]}{match[2]}={HIDDEN}" if is_secret_header(name) else match[0]


def is_identifying_header(name: str) -> bool:
    """Tell whether a header of this name may identify the client."""
    return _IDENTIFYING.search(name) is not None
