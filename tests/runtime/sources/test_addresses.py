"""Public addresses exclude this machine, its networks and cloud services in every notation."""

from __future__ import annotations

import ipaddress

import pytest

from tsx_runtime.errors import DownloadFailed, ModelNotFound
from tsx_runtime.sources.addresses import check_public, is_public, resolve

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
    "192.0.0.1",
    "192.0.0.8",
    "192.0.0.170",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "239.255.255.250",
    "240.0.0.1",
    "100.127.255.255",
    "172.31.255.255",
    "0.1.2.3",
    "::7f00:1",
    "::8.8.8.8",
    "::ffff:0:127.0.0.1",
    "::ffff:192.0.0.192",
    "::ffff:7f00:1%lo",
    "64:ff9b::10.0.0.1",
    "64:ff9b::1",
    "64:ff9b:0:0:0:1::1",
    "64:ff9b:1::1",
    "64:ff9b:1::8.8.8.8",
    "100::1",
    "100:0:0:1::1",
    "2001::1",
    "2001:0:808:808::f7f7:f7f7",
    "2001:0:808:808::80ff:fffe",
    "2001:2::1",
    "2001:10::1",
    "2001:db8::1",
    "2001:1::4",
    "2002:a9fe:a9fe::1",
    "2002:c000:c0::",
    "2600::5efe:10.0.0.1",
    "2600::200:5efe:127.0.0.1",
    "3fff::1",
    "3fff:fff::1",
    "5f00::1",
    "4000::1",
    "fc00::1",
    "fe80::1%eth0",
    "febf::1",
    "fec0::1",
    "feff::1",
    "ff0e::1",
    "200::1",
    "1::1",
]
PUBLIC = [
    "93.184.215.14",
    "8.8.8.8",
    "192.0.0.9",
    "192.0.0.10",
    "192.0.1.1",
    "192.88.98.1",
    "192.31.196.1",
    "192.52.193.1",
    "192.175.48.1",
    "198.17.255.255",
    "198.20.0.1",
    "223.255.255.255",
    "100.63.255.255",
    "172.32.0.1",
    "1.0.0.1",
    "2606:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "2002:808:808::1",
    "2600::5efe:8.8.8.8",
    "2001:1::1",
    "2001:3::1",
    "2001:4:112::1",
    "2001:20::1",
    "2001:30::1",
    "2001:200::1",
    "2620:4f:8000::1",
    "3ffe::1",
]


def test_one_private_address_makes_a_host_private() -> None:
    with pytest.raises(ModelNotFound, match="allow_private_urls"):
        check_public("somewhere", ["93.184.215.14", "10.1.2.3"])


def test_only_the_tables_decide_what_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        for name in ("is_global", "is_private", "is_multicast", "is_reserved", "is_loopback"):
            monkeypatch.setattr(
                kind, name, property(lambda address: pytest.fail("asked of Python"))
            )
    public = [
        address
        for address in PRIVATE + PUBLIC
        if is_public(ipaddress.ip_address(address.partition("%")[0]))
    ]
    assert public == PUBLIC


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "localhost"])
def test_alternative_spellings_of_loopback_are_recognized(host: str) -> None:
    with pytest.raises(ModelNotFound):
        check_public(host, resolve(host, 80))


def test_an_unknown_host_is_reported() -> None:
    with pytest.raises(DownloadFailed, match="is not known"):
        resolve("no-such-host.invalid", 80)
