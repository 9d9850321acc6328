from __future__ import annotations

import socket

import pytest

from tsx_runtime.errors import SettingError
from tsx_runtime.settings import Settings
from tsx_runtime.targets.listen import Address, addresses, bind, bound_address, parse_address


def test_an_address_is_a_host_and_a_port():
    assert parse_address("inference_address", "http://127.0.0.1:8080") == Address("127.0.0.1", 8080)
    assert parse_address("inference_address", "http://[::1]:0/") == Address("::1", 0)
    assert str(Address("::1", 80)) == "http://[::1]:80"


@pytest.mark.parametrize(
    "value", ["127.0.0.1:8080", "https://localhost:1", "http://localhost", "http://:80", "http://a:b", "http://a:99999", "", "http://a:1/x"]
)
def test_what_is_no_address_is_named_with_its_setting(value):
    with pytest.raises(SettingError, match=r"metrics_address is .* must look like http://"):
        parse_address("metrics_address", value)


def test_roles_with_the_same_address_share_one_socket_and_free_ports_are_never_shared():
    same = Settings(
        inference_address="http://127.0.0.1:8080", management_address="http://127.0.0.1:8080", metrics_address="http://127.0.0.1:9"
    )
    assert list(addresses(same).values()) == [["inference", "management"], ["metrics"]]
    free = Settings(inference_address="http://127.0.0.1:0", management_address="http://127.0.0.1:0", metrics_address="http://127.0.0.1:0")
    assert list(addresses(free).values()) == [["inference"], ["management"], ["metrics"]]


def test_a_free_port_is_found_and_told():
    address = Address("127.0.0.1", 0)
    with bind(address, ["inference"]) as sock:
        assert bound_address(sock, address).port > 0


def test_a_port_in_use_is_an_error_that_names_port_and_setting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"Port {port} on 127.0.0.1 is in use.*management_address.*choose another port"):
            bind(Address("127.0.0.1", port), ["management"])
