"""Addresses of listeners, and which machines can reach them."""

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
def test_an_address_is_parsed_in_three_forms(text: str, expected: Address) -> None:
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
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form http://HOST:PORT"):
        parse_address(text)


@given(st.sampled_from(["http://", "https://", "unix:", "unix:/"]), st.text(max_size=30))
def test_arbitrary_text_is_a_faithful_address_or_refused(scheme: str, text: str) -> None:
    try:
        address = parse_address(scheme + text)
    except ValueError:
        return
    assert address.path.startswith("/") if address.scheme == "unix" else address.host
    assert 0 <= address.port <= 65535
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("http://127.0.0.1:8080", True),
        ("http://127.9.8.7:1", True),
        ("https://localhost:8080", True),
        ("http://[::1]:8080", True),
        ("http://LOCALHOST:1", True),
        ("unix:/x", True),
        ("http://0.0.0.0:8080", False),
        ("http://[::]:8080", False),
        ("https://10.0.0.1:1", False),
        ("http://localhost.evil.org:1", False),
        ("http://127.0.0.1.evil.org:1", False),
    ],
)
def test_loopback_and_unix_sockets_are_local(text: str, is_local: bool) -> None:
    assert parse_address(text).is_local is is_local
