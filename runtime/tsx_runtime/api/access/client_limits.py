"""Limits per client: connections, requests per second, wrong tokens per minute.

A client is identified by its IPv4 address, or by the /64 network of its IPv6 address, because such
a network has one owner. Behind a reverse proxy of `trusted_proxies`, the client's address is read
from the proxy's `X-Forwarded-For`; other peers' `X-Forwarded-For` is ignored. Each listener has its
own counts.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import lru_cache
from math import ceil
from typing import TypeAlias

from tsx_runtime.errors import TooManyRequests
from tsx_runtime.settings.schema import Settings

# Default limits of addresses that other machines can reach.
DEFAULT_CONNECTIONS, DEFAULT_REQUESTS, DEFAULT_FAILURES = 1024, 20_000, 10
MAX_IDLE_CLIENTS = 10_000  # stored clients without a connection
REFUSAL_DELAY_S = 1.0  # delays a refusal, so that a few connections cannot send a flood
LOG_INTERVAL_S = 60.0  # time between two log lines
MAX_HOPS = 32  # hops that are read of an X-Forwarded-For
MAX_ADDRESS_CHARS = 64

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Pair: TypeAlias = tuple[bytes, bytes]

logger = logging.getLogger("tsx.http")


class RateLimit:
    """A number of events per period, as a token bucket (GCRA); 0 is no limit.

    GCRA stores each client's level as the time at which its bucket is full again.
    """

    def __init__(self, count: float, period: float, burst: float) -> None:
        self.interval = period / count if count else 0.0
        self.slack = self.interval * (burst - 1)

    def take(self, full_at: float, now: float) -> float | None:
        """Return the client's new level, or None if no event is left.

        Args:
            full_at: The former level, 0 for a new client.
            now: The current time.
        """
        if full_at > now + self.slack + 1e-9:
            return None
        return (full_at if full_at > now else now) + self.interval

    def wait(self, full_at: float, now: float) -> int:
        """Return the whole seconds until the next event is allowed."""
        return max(1, ceil(full_at - self.slack - now))


class Client:
    """The counts of one client."""

    __slots__ = ("connections", "failures", "key", "requests")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.connections = 0
        self.requests = self.failures = 0.0  # levels of `RateLimit`

    def __str__(self) -> str:
        """Return the address or network."""
        if len(self.key) == 4:
            return str(ipaddress.IPv4Address(self.key))
        return (
            f"{ipaddress.IPv6Address(self.key + bytes(8))}/64"
            if len(self.key) == 8
            else self.key.decode(errors="replace")
        )


class ClientLimits:
    """The clients of one listener: all connected ones, and the most recent idle ones."""

    def __init__(
        self,
        connections: int = 0,
        requests: int = 0,
        failures: int = 0,
        proxies: Iterable[str] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        max_idle_clients: int = MAX_IDLE_CLIENTS,
    ) -> None:
        """Limit the clients of a listener; 0 is no limit.

        Args:
            connections: Connections of one client.
            requests: Requests per second.
            failures: Wrong tokens per minute.
            proxies: Addresses and networks of trusted proxies.
            clock: A monotonic clock.
            max_idle_clients: The number of idle clients to store.
        """
        self.connections = connections
        self.requests = RateLimit(requests, 1.0, max(1, requests))
        self.failures = RateLimit(failures, 60.0, 2 * failures)
        self.clock = clock
        self.numbers = connections, requests, failures
        self._proxies = [ipaddress.ip_network(proxy) for proxy in proxies]
        self._max_idle_clients = max_idle_clients
        self._connected: dict[bytes, Client] = {}
        self._idle: OrderedDict[bytes, Client] = OrderedDict()
        self._logged_at = -LOG_INTERVAL_S

    def __len__(self) -> int:
        return len(self._connected) + len(self._idle)

    # Connections.

    def connect(self, host: str) -> Client:
        """Count a connection until `disconnect`.

        Raises:
            TooManyRequests: The client has reached its limit of connections.
        """
        key = client_key(host)
        client = self._connected.get(key)
        if client is None:
            client = self._connected[key] = self._idle_or_new(key)
        elif self.connections and client.connections >= self.connections:
            raise self._too_many_error(
                f"Clients may have {self.connections} connections each"
                " (max_connections_per_client), and this client has reached that. Close some, or"
                " send more requests over each.",
                1,
            )
        client.connections += 1
        return client

    def disconnect(self, client: Client) -> None:
        client.connections -= 1
        if not client.connections:
            del self._connected[client.key]
            self._remember(client)

    # Requests.

    def caller(self, host: str, headers: Iterable[Pair]) -> Client:
        """Return the client of a request from `host`; header names are in lower case."""
        key = client_key(self._client_address(host, headers) if self._proxies else host)
        client = self._connected.get(key)
        if client is None:
            self._remember(client := self._idle_or_new(key))
        return client

    def is_proxy(self, host: str) -> bool:
        address = parse_ip(host)
        return address is not None and any(address in network for network in self._proxies)

    def count_request(self, client: Client) -> None:
        """Count a request.

        Raises:
            TooManyRequests: The client has sent too many; delay the response by `REFUSAL_DELAY_S`.
        """
        now = self.clock()
        full_at = self.requests.take(client.requests, now)
        if full_at is None:
            rate = self.numbers[1]
            raise self._too_many_error(
                f"Clients may send {rate} requests a second each (max_requests_per_client). Send"
                " fewer.",
                self.requests.wait(client.requests, now),
            )
        client.requests = full_at

    def count_failure(self, client: Client) -> None:
        """Count a wrong token.

        Raises:
            TooManyRequests: The client has sent too many.
        """
        now = self.clock()
        full_at = self.failures.take(client.failures, now)
        if full_at is None:
            raise self._too_many_error(
                f"Clients may send {self.numbers[2]} wrong tokens a minute each"
                " (max_failed_tokens). The correct token is always accepted.",
                self.failures.wait(client.failures, now),
            )
        client.failures = full_at

    def _client_address(self, host: str, headers: Iterable[Pair]) -> str:
        """Return the last hop that is not a trusted proxy, because earlier hops may be forged."""
        if not self.is_proxy(host):
            return host
        forwarded_for = b",".join([value for name, value in headers if name == b"x-forwarded-for"])
        for hop in reversed(forwarded_for.decode("latin-1").rsplit(",", MAX_HOPS)[-MAX_HOPS:]):
            address = parse_ip(_without_port(hop.strip()))
            if address is None:
                break
            host = str(address)
            if not self.is_proxy(host):
                break
        return host

    def _idle_or_new(self, key: bytes) -> Client:
        return self._idle.pop(key) if key in self._idle else Client(key)

    def _remember(self, client: Client) -> None:
        self._idle[client.key] = client
        if len(self._idle) > self._max_idle_clients:
            self._idle.popitem(last=False)

    def _too_many_error(self, text: str, seconds: int) -> TooManyRequests:
        if self.clock() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = self.clock()
            logger.warning(
                "a client was refused: %s (where many share an address, see trusted_proxies; logged"
                " once a minute)",
                text,
            )
        return TooManyRequests(text, retry_after=seconds)


class Caller:
    """The client whose request the current task answers."""

    __slots__ = ("client", "delay_s", "limits")

    def __init__(self, limits: ClientLimits, client: Client) -> None:
        self.limits = limits
        self.client = client
        self.delay_s = 0.0  # delay of the response

    def count_failure(self) -> None:
        """Count a wrong token.

        Raises:
            TooManyRequests: The client has sent too many.
        """
        try:
            self.limits.count_failure(self.client)
        except TooManyRequests:
            self.delay_s = REFUSAL_DELAY_S
            raise


current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)


def client_limits(settings: Settings, *, is_local: bool) -> ClientLimits | None:
    """Return the limits of a listener, or None if it has none.

    A listener that only this machine can reach has no default limits.
    """
    defaults = (0, 0, 0) if is_local else (DEFAULT_CONNECTIONS, DEFAULT_REQUESTS, DEFAULT_FAILURES)
    configured = (
        settings.max_connections_per_client,
        settings.max_requests_per_client,
        settings.max_failed_tokens,
    )
    connections, requests, failures = (
        default if number is None else number
        for number, default in zip(configured, defaults, strict=True)
    )
    if not (connections or requests or failures):
        return None
    return ClientLimits(connections, requests, failures, settings.trusted_proxies)


@lru_cache(maxsize=4096)
def _parse_ip(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.version == 6 and address.ipv4_mapped) or address


def parse_ip(text: str) -> Address | None:
    return _parse_ip(text) if len(text) <= MAX_ADDRESS_CHARS else None


def client_key(host: str) -> bytes:
    """Return the key of an address's client; a text that is not an address is its own key."""
    address = parse_ip(host)
    if address is None:
        return host[:MAX_ADDRESS_CHARS].encode(errors="replace")
    return address.packed if address.version == 4 else address.packed[:8]


def _without_port(hop: str) -> str:
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
