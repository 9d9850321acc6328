"""Who may call what: bearer tokens, and, on loopback, no web page of another site. Pure decisions on a request's headers.

A browser sends a request to 127.0.0.1 for any page that asks it to, so a server on loopback is open to every page its
user visits. Such a request names a foreign `Host` (a rebound name) or a foreign `Origin`, and is refused.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from tsx_runtime.addresses import is_loopback_host, parse_address
from tsx_runtime.errors import ForeignOrigin, InvalidToken, SettingError
from tsx_runtime.http.asgi import Pair
from tsx_runtime.settings import Settings

FAILED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class Guard(NamedTuple):
    """What a request to some routes must show; raises a `TsxError` when it does not."""

    token: bytes | None = None
    hosts: frozenset[str] | None = None  # names beyond loopback's own that may be called; None: any

    def check(self, headers: Iterable[Pair]) -> None:
        authorization = b""
        for name, value in headers:
            if name == b"authorization":
                authorization = value
            elif self.hosts is not None and name == b"host":
                self._check_name("Host", value, _host_of("//" + value.decode("latin-1")))
            elif self.hosts is not None and name == b"origin":
                self._check_name("Origin", value, _host_of(value.decode("latin-1")))
        if self.token is not None and not _is_bearer(authorization, self.token):
            raise InvalidToken(FAILED + ". Send the header 'Authorization: Bearer <token>'.")

    def _check_name(self, header: str, value: bytes, host: str | None) -> None:
        assert self.hosts is not None
        if host is None or not (is_loopback_host(host) or host in self.hosts):
            shown = value[:200].decode("latin-1")
            raise ForeignOrigin(
                f"The request's {header} is {shown!r}, which is not this machine. A server on loopback takes management and metrics "
                "calls from this machine only; to call it by another name, give it that address and a token."
            )


class Guards(NamedTuple):
    """One a kind of route; None where nothing is to be checked, so that such routes pay nothing."""

    inference: Guard | None
    management: Guard | None
    metrics: Guard | None


def build_guards(settings: Settings) -> Guards:
    checked = not settings.disable_token_authorization
    inference = _token(settings.inference_token) if checked else None
    management = _token(settings.management_token) if checked else None
    return Guards(
        inference=Guard(inference) if inference else None,
        management=_local_guard(management, settings.management_address),
        metrics=_local_guard(management, settings.metrics_address),
    )


def required_tokens(settings: Settings) -> None:
    """Raise `SettingError` where an address is open to other machines and no token protects it."""
    if settings.disable_token_authorization:
        return
    for address, token in (
        ("inference_address", "inference_token"),
        ("management_address", "management_token"),
        ("metrics_address", "management_token"),
    ):
        value = getattr(settings, address)
        if address == "metrics_address" and not settings.enable_metrics_api:
            continue
        if not parse_address(value).is_local and not getattr(settings, token):
            raise SettingError(
                f"{address} is {value}, which other machines can reach, so {token} must be set. "
                f"Set {token}, or bind {address} to 127.0.0.1, or set disable_token_authorization to serve without tokens."
            )


def _local_guard(token: bytes | None, address: str) -> Guard | None:
    """No web page reaches a unix socket, and what its clients put into `Host` is theirs."""
    parsed = parse_address(address)
    open_to_pages = parsed.is_local and parsed.scheme != "unix"
    hosts = frozenset([parsed.host.lower()]) if open_to_pages else None
    return Guard(token, hosts) if token or open_to_pages else None


def _token(text: str | None) -> bytes | None:
    return text.encode() if text else None


def _is_bearer(authorization: bytes, token: bytes) -> bool:
    scheme, _, given = authorization.partition(b" ")
    return hmac.compare_digest(given.strip(), token) and scheme.lower() == b"bearer"


def _host_of(url: str) -> str | None:
    """The host of a URL in lower case, without port; None where there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
