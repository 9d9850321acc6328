"""Which address a host name leads to, looked up once: the address that was checked is the one that is connected to."""

from __future__ import annotations

import ipaddress
import socket
from typing import TypeAlias

from tsx_runtime.errors import DownloadFailed, ModelNotFound

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def addresses_of(host: str, port: int) -> list[str]:
    """Raises DownloadFailed where the name leads nowhere."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DownloadFailed(f"the host {host} is not known ({error})") from error
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def check_public(host: str, addresses: list[str]) -> None:
    """Raises ModelNotFound where one of the addresses is of this machine, of its network, or of the cloud's own services."""
    for text in addresses:
        if not is_public(ipaddress.ip_address(text)):
            raise ModelNotFound(
                f"The host {host} has the address {text}, which is not a public one. "
                "If models are to come from there, start the server with allow_private_urls=true."
            )


def is_public(address: Address) -> bool:
    return all(each.is_global and not each.is_multicast for each in unwrapped(address))


def unwrapped(address: Address) -> list[Address]:
    """The address, and every IPv4 address that it carries in one of the ways to do so."""
    found: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:  # it is no IPv6 address at all
            found = []
        found += [each for each in inner if each is not None]
    return found
