"""Who may call what: bearer tokens, and, on loopback, no web page of another site. Pure decisions on a request's headers.

A browser sends a request to 127.0.0.1 for any page that asks it to, so a server on loopback is open to every page its
user visits. Such a request names a foreign `Host` (a rebound name) or a foreign `Origin`, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from tsx_runtime.addresses import is_loopback_host, parse_address
from tsx_runtime.errors import ForeignOrigin, InvalidToken, SettingError
from tsx_runtime.http.asgi import Pair
from tsx_runtime.http.client_limits import calling
from tsx_runtime.http.tokens import FAILED as FAILED_TO_RENEW
from tsx_runtime.http.tokens import Key, Keys, build_keys
from tsx_runtime.plugins import Authenticate, Refused
from tsx_runtime.settings import GRPC_ROLES, Settings

FAILED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class Guard(NamedTuple):
    """What a request to some routes must show; raises a `TsxError` when it does not."""

    key: Key | None = None
    hosts: frozenset[str] | None = None  # names beyond loopback's own that may be called; None: any
    status: int = InvalidToken.status  # of a request whose token is wrong
    failed: str = FAILED
    origin: bytes | None = None  # of the one foreign site that may call
    role: str = ""
    plugins: tuple[Authenticate, ...] = ()  # asked once all of this is right

    def check(self, headers: Iterable[Pair]) -> None:
        authorization = b""
        for name, value in headers:
            if name == b"authorization":
                authorization = value
            elif self.hosts is not None and name == b"host":
                self._check_name("Host", value, _host_of("//" + value.decode("latin-1")))
            elif self.hosts is not None and name == b"origin" and value != self.origin:
                self._check_name("Origin", value, _host_of(value.decode("latin-1")))
        if self.key is not None and not self.key.is_right(authorization):
            if authorization and (caller := calling.get()) is not None:
                caller.count_failure()
            text = f"{self.failed}. Send the header 'Authorization: Bearer <token>'."
            raise InvalidToken(text, status=self.status, given=bool(authorization))
        if self.plugins:
            _ask_plugins(self.plugins, self.role, headers)

    def _check_name(self, header: str, value: bytes, host: str | None) -> None:
        assert self.hosts is not None
        if host is None or not (is_loopback_host(host) or host in self.hosts):
            shown = value[:200].decode("latin-1")
            raise ForeignOrigin(
                f"The request's {header} is {shown!r}, which is not this machine. A server on loopback takes management and metrics "
                "calls from this machine only; to call it by another name, give it that address and a token."
            )


def _ask_plugins(plugins: Iterable[Authenticate], role: str, headers: Iterable[Pair]) -> None:
    named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    for plugin in plugins:
        try:
            plugin(role, named)
        except Refused as refused:
            raise InvalidToken(str(refused), status=refused.status) from refused


class Guards(NamedTuple):
    """One a kind of route; None where nothing is to be checked, so that such routes pay nothing."""

    inference: Guard | None
    management: Guard | None
    metrics: Guard | None
    token: Guard | None  # of the way to a new token


def build_guards(settings: Settings, keys: Keys | None = None, plugins: Iterable[Authenticate] = ()) -> Guards:
    """Metrics ask for a management token that the user has set, but for none that was made up: who reads them would have to follow it."""
    keys = build_keys(settings) if keys is None else keys
    asked = tuple(plugins)
    status, origin = settings.token_failure_status, settings.cors_allowed_origin
    own = keys.management if keys.management and keys.management.lifetime is None else None
    return Guards(
        inference=Guard(keys.inference, status=status, role="inference", plugins=asked) if keys.inference or asked else None,
        management=_local_guard(
            Guard(keys.management, status=status, role="management", plugins=asked), settings.management_address, origin
        ),
        metrics=_local_guard(Guard(own, status=status, role="metrics", plugins=asked), settings.metrics_address, origin),
        token=_local_guard(
            Guard(keys.api, status=status, failed=FAILED_TO_RENEW), settings.management_address, settings.cors_allowed_origin
        ),
    )


def required_tokens(settings: Settings) -> None:
    """Raise `SettingError` where an address is open to other machines and no token protects it."""
    if settings.disable_token_authorization or settings.generate_tokens:
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
    for role in GRPC_ROLES if settings.enable_grpc else ():
        host, token = getattr(settings, f"{role}_address"), f"{role.removeprefix('grpc_')}_token"
        if not is_loopback_host(host) and not getattr(settings, token):
            raise SettingError(
                f"{role}_address is {host}, which other machines can reach, so {token} must be set. "
                f"Set {token}, or bind {role}_address to 127.0.0.1, or set disable_token_authorization to serve without tokens."
            )


def _local_guard(guard: Guard, address: str, cors_origin: str | None) -> Guard | None:
    """No web page reaches a unix socket, and what its clients put into `Host` is theirs.

    The site that `cors_allowed_origin` names is no foreign one; `*` lets any page read answers, but none manage the models of its visitor.
    """
    origin = cors_origin.encode() if cors_origin else None
    parsed = parse_address(address)
    open_to_pages = parsed.is_local and parsed.scheme != "unix"
    hosts = frozenset([parsed.host.lower()]) if open_to_pages else None
    return guard._replace(hosts=hosts, origin=origin) if guard.key or guard.plugins or open_to_pages else None


def _host_of(url: str) -> str | None:
    """The host of a URL in lower case, without port; None where there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
