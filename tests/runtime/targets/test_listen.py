from __future__ import annotations

import socket

import pytest

from tsx_runtime.errors import SettingError
from tsx_runtime.settings import Settings
from tsx_runtime.targets.listen import Address, addresses, bind, bound_address, listen


def test_an_address_is_written_as_settings_write_it():
    assert str(Address("127.0.0.1", 8080)) == "http://127.0.0.1:8080"
    assert str(Address("::1", 80)) == "http://[::1]:80"


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


def test_of_two_servers_that_start_side_by_side_the_second_is_told_that_the_port_is_taken():
    with bind(Address("127.0.0.1", 0), ["inference"]) as first:
        address = bound_address(first, Address("127.0.0.1", 0))
        in_use = pytest.raises(SettingError, match=f"Port {address.port} on 127.0.0.1 is in use.*inference_address")
        with in_use, bind(address, ["inference"]) as second:  # some systems allow it while neither listens
            listen(first, address, ["inference"])
            listen(second, address, ["inference"])
