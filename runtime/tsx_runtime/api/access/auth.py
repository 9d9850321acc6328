"""Authorization: bearer tokens, and, on loopback, no web page of another site.

Pure functions of a request's headers.

A browser sends a request to 127.0.0.1 for any page that asks it to, so a server on loopback is open
to every page its user visits. Such a request names a foreign `Host` (a rebound name) or a foreign
`Origin`, and is refused. One that a browser marks with `Sec-Fetch-Site: cross-site`, as it does for
images and forms without an `Origin` too, runs no handler on any address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.api.access.client_limits import calling
from tsx_runtime.api.access.origins import host_of, host_of_origin
from tsx_runtime.api.access.tokens import FAILED as FAILED_TO_RENEW
from tsx_runtime.api.access.tokens import BearerToken, Keys, build_keys
from tsx_runtime.api.headers import Pair
from tsx_runtime.errors import ForeignOrigin, InvalidToken, SettingError
from tsx_runtime.plugins import Authenticate, Refused
from tsx_runtime.settings.addresses import is_loopback_host, parse_address
from tsx_runtime.settings.schema import GRPC_ROLES, Settings

FAILED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class Guard(NamedTuple):
    """The authorization of a group of routes; raises a `TsxError` for a request without it."""

    key: BearerToken | None = None
    hosts: frozenset[str] | None = None  # names beyond loopback's own that may be called; None: any
    status: int = InvalidToken.status  # of a request whose token is wrong
    failed: str = FAILED
    origin: bytes | None = None  # of the one foreign site that may call
    role: str = ""
    plugins: tuple[Authenticate, ...] = ()  # called once all of this is right
    also: BearerToken | None = None  # another token that is right
    # refuse what a browser sends for a page of another site, unless that page's origin may call
    same_site: bool = False

    def check(self, headers: Iterable[Pair]) -> None:
        authorization = origin = b""
        cross_site = False
        for name, value in headers:
            if name == b"authorization":
                authorization = value
            elif name == b"origin":
                origin = value
                if self.hosts is not None and not self._may_call(value):
                    raise self._foreign("Origin", value)
            elif name == b"sec-fetch-site":
                cross_site = cross_site or value == b"cross-site"
            elif name == b"host" and self.hosts is not None and not self._is_own(host_of(value)):
                raise self._foreign("Host", value)
        if cross_site and self.same_site and not (origin and self._may_call(origin)):
            raise self._foreign("Sec-Fetch-Site", b"cross-site")
        if (
            self.key is not None
            and not self.key.is_right(authorization)
            and not (self.also and self.also.is_right(authorization))
        ):
            if authorization and (caller := calling.get()) is not None:
                caller.count_failure()
            text = f"{self.failed}. Send the header 'Authorization: Bearer <token>'."
            raise InvalidToken(text, status=self.status, has_token=bool(authorization))
        if self.plugins:
            _ask_plugins(self.plugins, self.role, headers)

    def check_socket(self, headers: Iterable[Pair]) -> None:
        """Of a WebSocket.

        A browser lets any page open one and read it, so where no token is needed its page's origin
        decides.
        """
        self.check(headers)
        named = dict(headers)
        origin = named.get(b"origin")
        if (
            origin is not None
            and self.same_site
            and host_of_origin(origin) != host_of(named.get(b"host", b""))
            and not self._may_call(origin)
        ):
            raise self._foreign("Origin", origin)

    def _may_call(self, origin: bytes) -> bool:
        """Whether pages of that origin may. `*` is none that management names (see
        `_local_guard`).
        """
        if origin == self.origin or (self.origin == b"*" and self.role == "inference"):
            return True
        return self._is_own(host_of_origin(origin))

    def _is_own(self, host: str | None) -> bool:
        return host is not None and (
            is_loopback_host(host) or (self.hosts is not None and host in self.hosts)
        )

    def _foreign(self, header: str, value: bytes) -> ForeignOrigin:
        shown = value[:200].decode("latin-1")
        return ForeignOrigin(
            f"The request's {header} is {shown!r}, which is not this machine or site."
            f" {_OPENS.get(self.role, _OPENS['management'])}"
        )


_OPENS = {
    "inference": (
        "A server on loopback takes predictions from programs and pages of this machine only, and"
        " one without a token takes none from pages of other sites. Add the host to allowed_hosts"
        " (* allows every host and page), or set cors_allowed_origin to the site."
    ),
    "management": (
        "A server on loopback takes management and metrics calls from this machine only. Behind a"
        " proxy, let the proxy send the server's address as Host, and set cors_allowed_origin to"
        " the site of the page; to call the server by another name, give it that address and a"
        " token."
    ),
}


def _ask_plugins(plugins: Iterable[Authenticate], role: str, headers: Iterable[Pair]) -> None:
    named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    for plugin in plugins:
        try:
            plugin(role, named)
        except Refused as refused:
            raise InvalidToken(str(refused), status=refused.status) from refused


class Guards(NamedTuple):
    """One guard per kind of route; None if there is nothing to check, so that such routes pay
    nothing.
    """

    inference: Guard | None
    management: Guard | None
    metrics: Guard | None
    token: Guard | None  # of the way to a new token


def build_guards(
    settings: Settings, keys: Keys | None = None, plugins: Iterable[Authenticate] = ()
) -> Guards:
    """Metrics ask for a management token that the user has set, but for none that was made up: a
    scraper would have to follow it.
    """
    keys = build_keys(settings) if keys is None else keys
    called = tuple(plugins)
    status, origin = settings.token_failure_status, settings.cors_allowed_origin
    own = keys.management if keys.management and keys.management.lifetime is None else None
    return Guards(
        inference=_inference_guard(
            Guard(
                keys.inference,
                status=status,
                role="inference",
                plugins=called,
                same_site=keys.inference is None,
            ),
            settings,
        ),
        management=_local_guard(
            Guard(
                keys.management,
                status=status,
                role="management",
                plugins=called,
                same_site=keys.management is None,
            ),
            settings.management_address,
            origin,
        ),
        metrics=_local_guard(
            Guard(own, status=status, role="metrics", plugins=called),
            settings.metrics_address,
            origin,
        ),
        token=_local_guard(
            Guard(keys.api, status=status, failed=FAILED_TO_RENEW),
            settings.management_address,
            settings.cors_allowed_origin,
        ),
    )


def required_tokens(settings: Settings) -> None:
    """Raise `SettingError` where an address is open to other machines and no token protects it."""
    if settings.disable_token_authorization or settings.generate_tokens:
        return
    needed = [("inference_address", "inference_token"), ("management_address", "management_token")]
    if settings.enable_metrics_api:
        needed.append(("metrics_address", "management_token"))
    if settings.enable_grpc:
        needed += [
            (f"{role}_address", f"{role.removeprefix('grpc_')}_token") for role in GRPC_ROLES
        ]
    for address, token in needed:
        value = getattr(settings, address)
        is_local = (
            is_loopback_host(value)
            if address.startswith("grpc_")
            else parse_address(value).is_local
        )
        if not is_local and not getattr(settings, token):
            raise SettingError(
                f"{address} is {value}, which other machines can reach, so {token} must be set. Set"
                f" {token}, or bind {address} to 127.0.0.1, or set disable_token_authorization to"
                " serve without tokens."
            )


def without_browsers(guard: Guard | None) -> Guard | None:
    """Of calls that no page can make, as gRPC's."""
    return (
        guard._replace(hosts=None, same_site=False)
        if guard is not None and (guard.key or guard.plugins)
        else None
    )


def _inference_guard(guard: Guard, settings: Settings) -> Guard | None:
    """As management's, but with the setting that opens it."""
    if "*" in settings.allowed_hosts:
        return guard._replace(same_site=False) if guard.key or guard.plugins else None
    guarded = _local_guard(guard, settings.inference_address, settings.cors_allowed_origin)
    if guarded is None or guarded.hosts is None:
        return guarded
    return guarded._replace(hosts=guarded.hosts | {host.lower() for host in settings.allowed_hosts})


def _local_guard(guard: Guard, address: str, cors_origin: str | None) -> Guard | None:
    """A client with a token is trusted from any site.

    No web page reaches a unix socket, and what its clients put into `Host` is theirs.

    The site that `cors_allowed_origin` names is no foreign one; `*` lets any page read answers, but
    none manage the models of its visitor.
    """
    parsed = parse_address(address)
    is_socket = parsed.scheme == "unix"
    guard = guard._replace(
        hosts=frozenset([parsed.host.lower()]) if parsed.is_local and not is_socket else None,
        origin=cors_origin.encode() if cors_origin else None,
        same_site=guard.same_site and not is_socket,
    )
    return guard if guard.key or guard.plugins or guard.hosts or guard.same_site else None
