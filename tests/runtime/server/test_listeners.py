"""Sockets at the configured addresses."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tsx_runtime.errors import SettingError
from tsx_runtime.server.listeners import Listener, addresses, listeners
from tsx_runtime.settings.addresses import Address, parse_address
from tsx_runtime.settings.schema import Settings

FREE = Address("127.0.0.1", 0)


def listening(address: Address, role: str = "inference") -> closing[Listener]:
    listener = Listener(address, [role])
    listener.listen()
    return closing(listener)


def unix(path: Path) -> Address:
    return parse_address(f"unix:{path}")


def test_roles_with_equal_addresses_share_a_socket_except_on_port_0():
    shared_settings = Settings(
        inference_address="unix:/a",
        management_address="unix:/a",
        metrics_address="https://127.0.0.1:9",
    )
    assert [roles for _, roles in addresses(shared_settings)] == [
        ["inference", "management"],
        ["metrics"],
    ]
    mixed_settings = Settings(
        inference_address="http://127.0.0.1:9",
        management_address="http://127.0.0.1:9",
        metrics_address="https://127.0.0.1:9",
    )
    assert [roles for _, roles in addresses(mixed_settings)] == [
        ["inference", "management"],
        ["metrics"],
    ]
    without_metrics = Settings(enable_metrics_api=False)
    assert [roles for _, roles in addresses(without_metrics)] == [["inference"], ["management"]]
    free_settings = Settings(
        inference_address="http://127.0.0.1:0",
        management_address="http://127.0.0.1:0",
        metrics_address="http://127.0.0.1:0",
    )
    with listeners(free_settings) as bound_listeners:
        assert [listener.roles for listener in bound_listeners] == [
            ["inference"],
            ["management"],
            ["metrics"],
        ]
        assert len({listener.address.port for listener in bound_listeners} - {0}) == 3


def test_all_used_ports_are_reported_together_with_their_settings():
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [sock.getsockname()[1] for sock in sockets]
        http, metrics = (f"http://127.0.0.1:{port}" for port in ports[:2])
        settings = Settings(
            inference_address=http, management_address=http, metrics_address=metrics
        )
        grpc = [
            (Address("127.0.0.1", ports[2], "grpc"), ["grpc_inference"]),
            (FREE, ["grpc_management"]),
        ]
        with pytest.raises(SettingError) as exc_info, listeners(settings, others=grpc):
            pass
    shared_line, single_line, grpc_port = exc_info.value.message.splitlines()
    assert f"Port {ports[0]} " in shared_line
    assert "(inference_address and management_address)" in shared_line
    assert shared_line.endswith("--port and --management-port of tsx serve.")
    assert f"Port {ports[1]} " in single_line
    assert single_line.endswith("--metrics-port of tsx serve.")
    assert f"Port {ports[2]} " in grpc_port
    assert grpc_port.endswith("--grpc-port of tsx serve.")


def test_the_second_of_two_concurrent_servers_reports_the_used_port():
    with closing(Listener(FREE, ["inference"])) as first:
        address = first.address
        port_in_use = pytest.raises(SettingError, match=f"Port {address.port} .*inference_address")
        # On some systems both can bind as long as neither listens.
        with port_in_use, closing(Listener(address, ["inference"])) as second:
            first.listen()
            second.listen()


def test_a_unix_socket_is_private_and_its_file_is_removed(tmp_path):
    path = tmp_path / "tsx.sock"
    with listening(unix(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def test_a_unix_socket_is_private_from_the_start_under_any_umask(tmp_path, monkeypatch):
    """Avoid a chmod after bind(), which another user could redirect to a different file."""
    path = tmp_path / "tsx.sock"
    monkeypatch.setattr(Path, "chmod", None)
    old_umask = os.umask(0)
    try:
        with listening(unix(path)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(old_umask)


def test_the_socket_of_a_killed_server_is_replaced(tmp_path):
    path = tmp_path / "tsx.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    assert path.exists()
    with listening(unix(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_on_which_a_program_listens_is_not_replaced(tmp_path):
    path = tmp_path / "tsx.sock"
    with listening(unix(path)):
        with pytest.raises(SettingError, match=f"listens at {path}.*metrics_address"):
            Listener(unix(path), ["metrics"])
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_server_that_lost_its_socket_path_fails_and_keeps_the_new_file(tmp_path):
    path = tmp_path / "tsx.sock"
    with closing(Listener(unix(path), ["inference"])) as slow_listener, listening(unix(path)):
        with pytest.raises(SettingError, match="Another program listens"):
            slow_listener.listen()
        slow_listener.close()
        assert path.exists()


@pytest.mark.parametrize(
    "kind", ["a file", "a directory", "a path without a directory", "a path that is too long"]
)
def test_an_invalid_socket_path_is_an_error_and_removes_nothing(tmp_path, kind):
    path = tmp_path / "here"
    if kind == "a file":
        path.write_text("precious")
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a path without a directory":
        path = path / "there"
    else:
        path = tmp_path / ("x" * 200)
    with pytest.raises(SettingError, match="inference_address"):
        Listener(unix(path), ["inference"])
    assert path.exists() == (kind in ("a file", "a directory"))
