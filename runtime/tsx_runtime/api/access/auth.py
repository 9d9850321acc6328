"""Authorization by tokens and, on loopback, by the origin of a browser's request.

All functions are pure functions of a request's headers.

Any page can let its visitor's browser send requests to 127.0.0.1, and so could call a server on
loopback. Such a request has a foreign `Origin`, or a foreign `Host` after DNS rebinding, and is
refused. Browsers send images and forms without an `Origin`, but mark them with `Sec-Fetch-Site:
cross-site`. A marked request runs no handler, whatever the server's address is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tsx_runtime.api.access.client_limits import current_caller
from tsx_runtime.api.access.origins import host_of, host_of_origin
from tsx_runtime.api.access.tokens import FAILED as RENEWAL_FAILED
from tsx_runtime.api.access.tokens import BearerToken, Keys, build_keys
from tsx_runtime.api.headers import Pair
from tsx_runtime.errors import ForeignOrigin, InvalidToken, SettingError
from tsx_runtime.plugins import Authenticate, Refused
from tsx_runtime.settings.addresses import is_loopback_host, parse_address
from tsx_runtime.settings.schema import Settings

FAILED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


class Guard(NamedTuple):
    """The authorization of a group of routes."""

    key: BearerToken | None = None
    hosts: frozenset[str] | None = None  # allowed in addition to loopback's names; None: any
    status: int = InvalidToken.status  # status of a wrong token
    failure_text: str = FAILED
    origin: bytes | None = None  # the single foreign site that may call
    role: str = ""
    plugins: tuple[Authenticate, ...] = ()  # called after all other checks
    second_key: BearerToken | None = None  # a second valid token
    # Whether to refuse requests of other sites' pages, except those of `origin`.
    same_site: bool = False

    def check(self, headers: Iterable[Pair]) -> None:
        """Check the headers of a request.

        Raises:
            ForeignOrigin: A page of a foreign site has sent the request.
            InvalidToken: The token is wrong or missing, or a plugin refuses the request.
            TooManyRequests: The client has sent too many wrong tokens.
        """
        authorization = origin = b""
        cross_site = False
        for name, value in headers:
            if name == b"authorization":
                authorization = value
            elif name == b"origin":
                origin = value
                if self.hosts is not None and not self._is_allowed_origin(value):
                    raise self._foreign_origin_error("Origin", value)
            elif name == b"sec-fetch-site":
                cross_site = cross_site or value == b"cross-site"
            elif name == b"host" and self.hosts is not None and not self._is_own(host_of(value)):
                raise self._foreign_origin_error("Host", value)
        if cross_site and self.same_site and not (origin and self._is_allowed_origin(origin)):
            raise self._foreign_origin_error("Sec-Fetch-Site", b"cross-site")
        if (
            self.key is not None
            and not self.key.matches(authorization)
            and not (self.second_key and self.second_key.matches(authorization))
        ):
            if authorization and (caller := current_caller.get()) is not None:
                caller.count_failure()
            text = f"{self.failure_text}. Send the header 'Authorization: Bearer <token>'."
            raise InvalidToken(text, status=self.status, has_token=bool(authorization))
        if self.plugins:
            _ask_plugins(self.plugins, self.role, headers)

    def check_socket(self, headers: Iterable[Pair]) -> None:
        """Check the headers of a WebSocket.

        A browser lets any page open a WebSocket and read from it. If the server needs no token,
        the page's origin must therefore be allowed.

        Raises:
            ForeignOrigin: A page of a foreign site opens the WebSocket.
            InvalidToken: The token is wrong or missing.
        """
        self.check(headers)
        values = dict(headers)
        origin = values.get(b"origin")
        if (
            origin is not None
            and self.same_site
            and host_of_origin(origin) != host_of(values.get(b"host", b""))
            and not self._is_allowed_origin(origin)
        ):
            raise self._foreign_origin_error("Origin", origin)

    def _is_allowed_origin(self, origin: bytes) -> bool:
        """Tell whether pages of an origin may call; `*` does not allow them to manage models."""
        if origin == self.origin or (self.origin == b"*" and self.role == "inference"):
            return True
        return self._is_own(host_of_origin(origin))

    def _is_own(self, host: str | None) -> bool:
        return host is not None and (
            is_loopback_host(host) or (self.hosts is not None and host in self.hosts)
        )

    def _foreign_origin_error(self, header: str, value: bytes) -> ForeignOrigin:
        text = value[:200].decode("latin-1")
        return ForeignOrigin(
            f"The request's {header} is {text!r}, which is not this machine or site."
            f" {_ADVICE_BY_ROLE.get(self.role, _ADVICE_BY_ROLE['management'])}"
        )


_ADVICE_BY_ROLE = {
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
    headers_by_name = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers
    }
    for plugin in plugins:
        try:
            plugin(role, headers_by_name)
        except Refused as refused:
            raise InvalidToken(str(refused), status=refused.status) from refused


class Guards(NamedTuple):
    """One guard per kind of route; None means that the routes need no check."""

    inference: Guard | None
    management: Guard | None
    metrics: Guard | None
    token: Guard | None  # the guard of `/token`, which replaces a token


def build_guards(
    settings: Settings, keys: Keys | None = None, plugins: Iterable[Authenticate] = ()
) -> Guards:
    """Build the guards of the settings.

    Metrics require the management token only if the user has set it. A generated token expires,
    and a scraper cannot renew it.
    """
    keys = build_keys(settings) if keys is None else keys
    all_plugins = tuple(plugins)
    status, origin = settings.token_failure_status, settings.cors_allowed_origin
    scraper_key = keys.management if keys.management and keys.management.lifetime is None else None
    return Guards(
        inference=_inference_guard(
            Guard(
                keys.inference,
                status=status,
                role="inference",
                plugins=all_plugins,
                same_site=keys.inference is None,
            ),
            settings,
        ),
        management=_local_guard(
            Guard(
                keys.management,
                status=status,
                role="management",
                plugins=all_plugins,
                same_site=keys.management is None,
            ),
            settings.management_address,
            origin,
        ),
        metrics=_local_guard(
            Guard(scraper_key, status=status, role="metrics", plugins=all_plugins),
            settings.metrics_address,
            origin,
        ),
        token=_local_guard(
            Guard(keys.api, status=status, failure_text=RENEWAL_FAILED),
            settings.management_address,
            settings.cors_allowed_origin,
        ),
    )


def check_required_tokens(settings: Settings) -> None:
    """Check that each address that other machines can reach has a token.

    Raises:
        SettingError: Other machines can reach an address without a token.
    """
    if settings.disable_token_authorization or settings.generate_tokens:
        return
    for role, address in settings.addresses().items():
        name = f"{role}_address"
        token = "inference_token" if role.endswith("inference") else "management_token"
        if not address.is_local and not getattr(settings, token):
            raise SettingError(
                f"{name} is {getattr(settings, name)}, which other machines can reach, so {token}"
                f" must be set. Set {token}, or bind {name} to 127.0.0.1, or set"
                " disable_token_authorization to serve without tokens."
            )


def without_browser_checks(guard: Guard | None) -> Guard | None:
    """Return the guard for calls that a web page cannot make, such as gRPC calls."""
    return (
        guard._replace(hosts=None, same_site=False)
        if guard is not None and (guard.key or guard.plugins)
        else None
    )


def _inference_guard(guard: Guard, settings: Settings) -> Guard | None:
    """Return the guard of the inference address, which also accepts `allowed_hosts`."""
    if "*" in settings.allowed_hosts:
        return guard._replace(same_site=False) if guard.key or guard.plugins else None
    local_guard = _local_guard(guard, settings.inference_address, settings.cors_allowed_origin)
    if local_guard is None or local_guard.hosts is None:
        return local_guard
    return local_guard._replace(
        hosts=local_guard.hosts | {host.lower() for host in settings.allowed_hosts}
    )


def _local_guard(guard: Guard, address: str, cors_origin: str | None) -> Guard | None:
    """Return a guard that refuses foreign sites on a local address.

    A client with a token may call from any site. A page cannot reach a unix socket, so `Host` is
    not checked there. The site of `cors_allowed_origin` is not foreign. If that is `*`, any page
    may read responses, but may not manage models.
    """
    parsed = parse_address(address)
    is_socket = parsed.scheme == "unix"
    guard = guard._replace(
        hosts=frozenset([parsed.host.lower()]) if parsed.is_local and not is_socket else None,
        origin=cors_origin.encode() if cors_origin else None,
        same_site=guard.same_site and not is_socket,
    )
    return guard if guard.key or guard.plugins or guard.hosts or guard.same_site else None
