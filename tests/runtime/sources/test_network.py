"""Which addresses are public: none of this machine, its networks or the cloud's own services, in whatever form."""

from __future__ import annotations

import ipaddress

import pytest

from tsx_runtime.errors import DownloadFailed, ModelNotFound
from tsx_runtime.sources.network import addresses_of, check_public, is_public

PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fd00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "2002:7f00:0001::",
    "64:ff9b::169.254.169.254",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(ModelNotFound, match="allow_private_urls"):
        check_public("somewhere", ["93.184.215.14", address])


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_a_public_address_is_not(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "localhost"])
def test_other_ways_to_write_this_machine_are_seen_through(host: str) -> None:
    with pytest.raises(ModelNotFound):
        check_public(host, addresses_of(host, 80))


def test_a_host_that_is_not_known_is_told() -> None:
    with pytest.raises(DownloadFailed, match="is not known"):
        addresses_of("no-such-host.invalid", 80)
