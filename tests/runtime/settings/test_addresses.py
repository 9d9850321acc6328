"""What is an address, and who can reach it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.settings.addresses import Address, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:8080", Address("127.0.0.1", 8080)),
        ("http://localhost:0/", Address("localhost", 0)),
        ("http://[::1]:8080", Address("::1", 8080)),
        ("https://models.example.org:8443", Address("models.example.org", 8443, "https")),
        ("unix:/tmp/inference.sock", Address("", 0, "unix", "/tmp/inference.sock")),
        ("unix:///tmp/inference.sock", Address("", 0, "unix", "/tmp/inference.sock")),
    ],
)
def test_an_address_has_three_forms(text: str, expected: Address) -> None:
    assert parse_address(text) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8080",
        "http://127.0.0.1",
        "http://:8080",
        "http://a b:1",
        "http://user@host:1",
        "http://host:1/path",
        "http://host:65536",
        "http://::1:80",
        "ftp://host:1",
        "unix:",
        "unix:relative.sock",
        "unix://relative.sock",
        "unix:/directory/",
        "unix:/a\0b",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="not of the form http://HOST:PORT, https://HOST:PORT or unix:/PATH"
    ):
        parse_address(text)


@given(st.sampled_from(["http://", "https://", "unix:", "unix:/"]), st.text(max_size=30))
def test_no_text_is_half_an_address_and_each_means_what_it_says(scheme: str, text: str) -> None:
    try:
        address = parse_address(scheme + text)
    except ValueError:
        return
    assert address.path.startswith("/") if address.scheme == "unix" else address.host
    assert 0 <= address.port <= 65535
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8080",
        "http://127.9.8.7:1",
        "https://localhost:8080",
        "http://[::1]:8080",
        "http://LOCALHOST:1",
        "unix:/x",
    ],
)
def test_only_this_machine_reaches_loopback_and_unix_sockets(text: str) -> None:
    assert parse_address(text).is_local


@pytest.mark.parametrize(
    "text",
    [
        "http://0.0.0.0:8080",
        "http://[::]:8080",
        "https://10.0.0.1:1",
        "http://localhost.evil.org:1",
        "http://127.0.0.1.evil.org:1",
    ],
)
def test_other_machines_reach_the_others(text: str) -> None:
    assert not parse_address(text).is_local
