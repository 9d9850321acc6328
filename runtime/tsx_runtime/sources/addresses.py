"""The resolution of a URL's host to addresses or a proxy.

A host name is resolved only once, so that the connection uses the checked address.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TypeAlias
from urllib import request

from tsx_runtime.errors import DownloadFailed, ModelNotFound
from tsx_runtime.sources.urls import ModelUrl

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Networks: TypeAlias = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def _networks(text: str) -> Networks:
    return tuple(map(ipaddress.ip_network, text.split()))


# IANA's registries of special-purpose addresses as of 2024-10-22, and multicast. REACHABLE lists
# the exceptions that are "globally reachable". `ipaddress.is_global` follows the registries since
# Python 3.11.9, 3.12.4 and 3.13.
# https://www.iana.org/assignments/iana-ipv4-special-registry,
# https://www.iana.org/assignments/iana-ipv6-special-registry
_IPV4_SPECIAL = _networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24"
    " 192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24"
    " 224.0.0.0/4 240.0.0.0/4"
)
_IPV4_REACHABLE = _networks("192.0.0.9/32 192.0.0.10/32")
# All other addresses are unassigned, local, multicast or special.
_IPV6_ALLOCATED = _networks("2000::/3 64:ff9b::/96")
_IPV6_SPECIAL = _networks("2001::/23 2001:db8::/32 3fff::/20")
_IPV6_REACHABLE = _networks(
    "2001:1::1/128 2001:1::2/128 2001:1::3/128 2001:3::/32 2001:4:112::/48 2001:20::/28"
    " 2001:30::/28"
)
_MAPPED = ipaddress.ip_network("::ffff:0:0/96")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_6TO4 = ipaddress.ip_network("2002::/16")
_ISATAP = 0x00005EFE  # RFC 5214: precedes the IPv4 address; the bit 0x02000000 may be set


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host.

    Raises:
        DownloadFailed: The host is not known.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DownloadFailed(f"the host {host} is not known ({error})") from error
    return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))


def check_public(host: str, addresses: list[str]) -> None:
    """Refuse addresses of this machine, of its network and of the cloud's internal services.

    Raises:
        ModelNotFound: One of the addresses is not public.
    """
    for text in addresses:
        if not is_public(ipaddress.ip_address(text)):
            raise ModelNotFound(
                f"The host {host} has the address {text}, which is not a public one. To load models"
                " from it, name the host in allowed_urls, or start the server with"
                " allow_private_urls=true."
            )


def is_public(address: Address) -> bool:
    """Tell whether an address, and every IPv4 address embedded in it, is public."""
    if isinstance(address, ipaddress.IPv4Address):
        return _is_reachable(address, _IPV4_SPECIAL, _IPV4_REACHABLE)
    embedded = _embedded_ipv4(address)
    if address in _MAPPED:  # The address is an IPv4 address in IPv6 notation.
        return all(map(is_public, embedded))
    return (
        any(address in network for network in _IPV6_ALLOCATED)
        and _is_reachable(address, _IPV6_SPECIAL, _IPV6_REACHABLE)
        and all(map(is_public, embedded))
    )


def _is_reachable(address: Address, special: Networks, exceptions: Networks) -> bool:
    return not any(address in network for network in special) or any(
        address in network for network in exceptions
    )


def _embedded_ipv4(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that are mapped or embedded by NAT64, 6to4 or ISATAP.

    Other forms (Teredo, IPv4-compatible, translated) need no check: they are never public.
    """
    number = int(address)
    low_bits = ipaddress.IPv4Address(number & 0xFFFFFFFF)
    addresses = (
        [low_bits]
        if address in _MAPPED or address in _NAT64 or (number >> 32) & 0xFDFFFFFF == _ISATAP
        else []
    )
    return (
        [*addresses, ipaddress.IPv4Address((number >> 80) & 0xFFFFFFFF)]
        if address in _6TO4
        else addresses
    )


def proxy_for(url: ModelUrl) -> str | None:
    """Return the URL of the proxy, which may contain a password.

    HTTPS_PROXY, HTTP_PROXY or ALL_PROXY name it, in upper or lower case. NO_PROXY excludes hosts.
    """
    proxies = request.getproxies_environment()
    host = url.host if url.port is None else f"{url.host}:{url.port}"
    # The `requests` library uses this function too, although typeshed lacks it.
    if request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return None
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None
