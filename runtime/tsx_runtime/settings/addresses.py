"""The addresses of a server: `http://HOST:PORT`, `https://HOST:PORT`, `unix:/PATH`."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

FORMS = "http://HOST:PORT, https://HOST:PORT or unix:/PATH"

_TCP = re.compile(r"(https?)://(?:\[([0-9a-fA-F:.]+)\]|([^\s/:\[\]@?#]+)):(\d{1,5})/?")
_UNIX = re.compile(r"unix:(?://)?(/(?!/)[^\0]*[^\0/])")


class Address(NamedTuple):
    """A host and a port, or a path if the scheme is `unix`.

    The text has brackets around an IPv6 host; the field `host` has none.
    """

    host: str
    port: int
    scheme: str = "http"
    path: str = ""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return self.scheme == "unix" or is_loopback_host(self.host)


def parse_address(text: str) -> Address:
    """Parse the text of an address.

    Raises:
        ValueError: The text has none of the `FORMS`.
    """
    if match := _UNIX.fullmatch(text):
        return Address("", 0, "unix", match[1])
    match = _TCP.fullmatch(text)
    if match is None or int(match[4]) > 65535:
        raise ValueError(f"not of the form {FORMS}")
    return Address(match[2] or match[3], int(match[4]), match[1])


def is_loopback_host(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
