"""Replacing a server while its clients continue, and sockets passed by systemd."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from tests.support.clients.rawhttp import RawConnection, request
from tests.support.models import make_model
from tests.support.servers import DEADLINE, FreePorts, Running, clean, serving, tsx
from tsx_runtime.api.access.tokens import build_keys, generated_tokens
from tsx_runtime.errors import SettingError, Unavailable
from tsx_runtime.server.handover import _connect, replaceable
from tsx_runtime.server.listeners import Listener, PassedSocket, bind_unix
from tsx_runtime.server.systemd import passed_sockets, use_sockets
from tsx_runtime.settings.addresses import Address
from tsx_runtime.settings.schema import Settings

pytestmark = pytest.mark.anyio
OTHER_UID = 54321
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can give files to another user",
)

ECHO = "def handle(data, context):\n    return None if data is None else [%r] * len(data)\n"
AS_SYSTEMD = """
import os, sys
for place, passed in enumerate(sys.argv[1:3], 3):
    os.dup2(int(passed), place)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "inference:management"}
os.execv(sys.executable, [sys.executable, "-m", "tsx_cli", *sys.argv[3:]])
"""
HOLDING = """
def handle(data, context):
    if data is None:
        return None
    if bytes(data[0]["body"]) == b"hold":
        open("%s").read()
    return ["held" if bytes(row["body"]) == b"hold" else "old" for row in data]
"""
GATED = "open('%s').read()\n"  # This waits until the test has opened and closed the FIFO.
BROKEN = "import no_such_library\n\ndef handle(data, context):\n    return data\n"


class Server:
    """Successive servers with the same address, state directory and key file."""

    def __init__(self, directory: Path, ports: list[int], stack: ExitStack) -> None:
        self.directory, self.ports, self._stack = directory, ports, stack
        self.key_file, self.metrics = directory / "keys.json", directory / "m.sock"
        self.settings: dict[str, object] = {
            "generate_tokens": "true",
            "key_file": self.key_file,
            "metrics_address": f"unix:{self.metrics}",
            "state_dir": directory / "state",
            "cache_dir": directory / "cache",
        }
        self.code = {"broken": BROKEN}

    def command(self, handler: str, *options: str) -> tuple[list[object], Path]:
        """Make the model of a server; return the start command and its directory."""
        directory = self.directory / handler
        make_model(directory / "echo", self.code.get(handler, ECHO % handler))
        ports = ["--port", self.ports[0], "--management-port", self.ports[1]]
        settings = [f"--set={name}={value}" for name, value in self.settings.items()]
        return ["serve", directory / "echo", *ports, *options, *settings], directory

    def start(self, handler: str, *options: str) -> Running:
        return self._stack.enter_context(serving(*self.command(handler, *options), {}))

    def error_of_start(self, handler: str, *options: str) -> str:
        result = tsx(*self.command(handler, *options), {})
        assert result.returncode != 0
        return result.stderr

    def key(self, role: str) -> str:
        return str(json.loads(self.key_file.read_text())[role]["key"])

    @property
    def token(self) -> str:
        return self.key("inference")

    def connect(self, port: int | None = None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port or self.ports[0], timeout=DEADLINE)

    def ask(
        self,
        connection: http.client.HTTPConnection | None = None,
        path: str = "/predictions/echo",
        body: bytes = b"x",
        method: str = "POST",
        **headers: str,
    ) -> tuple[int, bytes]:
        connection = connection or self.connect()
        connection.request(method, path, body, {"Authorization": f"Bearer {self.token}", **headers})
        response = connection.getresponse()
        return response.status, response.read()

    def gate(self, name: str) -> Path:
        os.mkfifo(self.directory / name)
        return self.directory / name


@pytest.fixture
def server(processes: None, short_path: Path, free_ports: FreePorts) -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(short_path, free_ports(2), stack)


class Load(threading.Thread):
    """A thread that repeats a call and counts its results."""

    def __init__(self, call: Callable[[], str]) -> None:
        super().__init__()
        self.call = call
        self.results: Counter[str] = Counter()
        self.stop_event = threading.Event()

    def run(self) -> None:
        while not self.stop_event.wait(0.005):
            self.results[self.call()] += 1


def http_call(server: Server, method: str, path: str, *, keep_alive: bool) -> Callable[[], str]:
    """Return a call that uses either one kept connection or a new one each time."""
    connection = server.connect()
    body = b"x" if method == "POST" else None
    headers = {"Authorization": f"Bearer {server.token}"}

    def call() -> str:
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return repr(error)
        if not keep_alive:
            connection.close()
        return f"{response.status} {text}" if body else str(response.status)

    return call


def grpc_call(channel: grpc.Channel) -> Callable[[], str]:
    ping = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Ping")

    def call() -> str:
        try:
            ping(b"", timeout=DEADLINE, wait_for_ready=True)
        except grpc.RpcError as error:
            return "CANCELLED" if error.code() is grpc.StatusCode.CANCELLED else str(error)
        return "OK"

    return call


def test_a_server_is_replaced_under_load_without_failed_requests(
    server: Server, free_ports: FreePorts, until: Callable[[Callable[[], object]], None]
) -> None:
    (port,) = free_ports(1)
    server.settings |= {"enable_grpc": "true"}
    server.settings |= dict.fromkeys(("grpc_inference_port", "grpc_management_port"), port)
    old_server = server.start("old")
    token = server.token
    idle_connection = server.connect()
    assert server.ask(idle_connection) == (200, b"old")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        loads = [
            Load(http_call(server, method, path, keep_alive=keep_alive))
            for method, path in (("POST", "/predictions/echo"), ("GET", "/readyz"))
            for keep_alive in (True, False)
        ]
        loads.append(Load(grpc_call(channel)))
        for load in loads:
            load.start()
        try:
            server.start("new", "--replace")
            # A connection of the old server may still send one request.
            assert server.ask(idle_connection) == (200, b"old")
            assert old_server.process.wait(DEADLINE) == 0
            counts = [load.results.total() for load in loads]
            until(
                lambda: all(
                    load.results.total() >= count + 5
                    for load, count in zip(loads, counts, strict=True)
                )
            )
        finally:
            for load in loads:
                load.stop_event.set()
                load.join()
    # gRPC cancels a call that arrives at the moment when its server stops.
    assert loads[-1].results.pop("CANCELLED", 0) <= 1
    expected = {"200 old", "200 new", "200", "OK"}
    assert {result for load in loads for result in load.results} == expected
    assert all(load.results["200 new"] >= 5 for load in loads[:2])
    assert "Traceback" not in old_server.log
    assert server.token == token
    with socket.socket(socket.AF_UNIX) as connection:  # The file belongs to the new server.
        connection.settimeout(DEADLINE)
        connection.connect(str(server.metrics))
        connection.sendall(request(b"GET", b"/livez", [(b"Connection", b"close")]))
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_failed_start_replaces_nothing_but_later_starts_do(server: Server) -> None:
    server.settings |= {"drain_timeout": 1}
    first = server.start("first")
    error = server.error_of_start("broken", "--replace")
    assert "no_such_library" in error
    assert "was not replaced" in error
    assert server.ask() == (200, b"first")
    assert server.metrics.exists()
    assert "replace this one did not start" in first.log
    assert "in use" in server.error_of_start("taken")
    assert server.ask() == (200, b"first")
    # Another user cannot read the secret file next to the socket.
    with socket.socket(socket.AF_UNIX) as other_user_socket:
        other_user_socket.settimeout(DEADLINE)
        other_user_socket.connect(str(next((server.directory / "state").glob("*.sock"))))
        other_user_socket.sendall(b"guess\n")
        assert socket.recv_fds(other_user_socket, 100, 10)[:2] == (b"", [])
    with RawConnection(("127.0.0.1", server.ports[0])) as silent_connection:
        silent_connection.send(request(b"GET", b"/ping"))
        assert silent_connection.answer(b"GET") is not None
        second = server.start("second", "--replace")
        assert silent_connection.answer() is None  # drain_timeout has passed without a request
    assert first.process.wait(DEADLINE) == 0
    third = server.start("third", "--replace")
    assert second.process.wait(DEADLINE) == 0
    assert server.ask() == (200, b"third")
    assert third.stop() == 0
    assert not server.metrics.exists()
    assert not server.key_file.exists()
    assert list((server.directory / "state").glob("*.sock")) == []
    assert list((server.directory / "state").glob("*.key")) == []


def test_a_server_stopped_during_a_handover_hands_over_at_once(
    server: Server, until: Callable[[Callable[[], object]], None]
) -> None:
    loading_gate, running_gate = server.gate("loading"), server.gate("running")
    server.code = {"old": HOLDING % running_gate, "new": GATED % loading_gate + ECHO % "new"}
    old_server = server.start("old")
    status, text = server.ask(body=b"hold", Prefer="respond-async")
    job = f"/jobs/{json.loads(text)['id']}"
    assert status == 202
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(server.start, "new", "--replace")
        # Opening the FIFO waits until the other end reads.
        with running_gate.open("w"):
            with loading_gate.open("w"):
                old_server.process.terminate()
                until(lambda: "stopping: no new requests" in old_server.log)
            started.result()
            assert old_server.process.poll() is None
            assert server.ask() == (200, b"new")
            assert server.ask(Prefer="respond-async, wait=60") == (200, b"new")
            status, text = server.ask(path=f"{job}?wait=0", body=b"", method="GET")
            assert json.loads(text)["state"] == "running"
        assert old_server.process.wait(DEADLINE) == 0
    assert server.ask(path=job, body=b"", method="GET") == (200, b"held")
    assert server.key_file.exists()


@pytest.mark.nightly
@pytest.mark.parametrize("becomes_ready", [True, False])
def test_tokens_stay_valid_and_in_their_file_during_a_handover(
    server: Server, becomes_ready: bool
) -> None:
    loading_gate = server.gate("loading")
    server.code = {"new": GATED % loading_gate + (ECHO % "new" if becomes_ready else BROKEN)}
    old_server = server.start("old")
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(server.start, "new", "--replace")
        with loading_gate.open("w"):
            token, api = server.token, f"Bearer {server.key('API')}"
            management = server.connect(server.ports[1])
            status, _ = server.ask(
                management, "/token?type=inference", b"", "GET", Authorization=api
            )
            assert (status, server.token != token) == (200, True)
            assert old_server.stop() == 0
            assert server.key_file.exists()
        if becomes_ready:
            new = started.result()
            assert server.ask() == (200, b"new")
            assert new.stop() == 0
        else:
            with pytest.raises(AssertionError, match="has ended meanwhile"):
                started.result()
    assert not server.key_file.exists()


def test_without_a_running_server_a_replacement_starts_as_usual(server: Server) -> None:
    only = server.start("only", "--replace")
    assert server.ask() == (200, b"only")
    assert "no server to replace" in only.log


def test_the_error_for_a_different_state_directory_names_the_setting(server: Server) -> None:
    server.start("old")
    server.settings |= {"state_dir": server.directory / "elsewhere"}
    error = server.error_of_start("new", "--replace")
    assert f"none is running at {server.directory / 'elsewhere'}" in error
    assert f"http://127.0.0.1:{server.ports[0]}: it has another state" in error
    assert server.ask() == (200, b"old")


def test_a_free_port_cannot_be_replaced(server: Server) -> None:
    server.ports[0] = 0
    assert "inference_address" in server.error_of_start("free", "--replace")


@pytest.mark.nightly
def test_clients_wait_in_systemds_socket_backlog_while_models_load(
    processes: None, short_path: Path
) -> None:
    make_model(short_path / "echo", ECHO % "hello")
    with (
        socket.create_server(("127.0.0.1", 0)) as inference,
        socket.socket(socket.AF_UNIX) as management,
    ):
        management.bind(str(short_path / "m.sock"))
        management.listen()
        early_connection = RawConnection(inference.getsockname())
        early_connection.send(request(target=b"/predictions/echo", body=b"x"))
        settings = [f"--set=cache_dir={short_path / 'cache'}", "--set=enable_metrics_api=false"]
        descriptors = [inference.fileno(), management.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-c", AS_SYSTEMD, *map(str, descriptors), "serve", "echo", *settings],
            cwd=short_path,
            env=clean({}),
            pass_fds=descriptors,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            with early_connection:
                answer = early_connection.answer()
                assert answer is not None
                assert (answer.status, answer.body) == (200, b"hello")
            process.terminate()
            output = process.communicate(timeout=DEADLINE)[0]
            assert process.returncode == 0
            assert f"http://127.0.0.1:{inference.getsockname()[1]}" in output
            assert f"unix:{short_path / 'm.sock'}" in output
            assert (short_path / "m.sock").exists()  # systemd owns the file, so it is not removed.
        finally:
            process.kill()
            process.wait()


def test_a_role_with_a_passed_sockets_address_shares_the_socket() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as inference,
        socket.create_server(("127.0.0.1", 0)) as metrics,
    ):
        configured = Settings(
            inference_address="https://10.0.0.1:443", management_address="https://10.0.0.1:443"
        )
        settings, passed_sockets = use_sockets(
            configured, {"inference": inference, "metrics": metrics}
        )
        addresses = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in (inference, metrics)]
        assert (
            settings.inference_address == settings.management_address == f"https://{addresses[0]}"
        )
        assert settings.metrics_address == f"http://{addresses[1]}"
        assert list(passed_sockets) == addresses


@pytest.mark.parametrize(
    ("name", "error"),
    [("tsx.socket", "'tsx.socket'.*FileDescriptorName"), ("", "FileDescriptorName")],
)
def test_a_passed_socket_without_a_role_is_an_error(name: str, error: str) -> None:
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": name}
    with pytest.raises(SettingError, match=error):
        passed_sockets(environment)
    assert environment == {}


def test_sockets_passed_to_another_process_are_ignored() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "inference"}
    assert passed_sockets(environment) == {}
    assert len(environment) == 3


async def test_a_successor_gets_current_and_later_renewed_tokens(short_path: Path) -> None:
    settings = Settings(generate_tokens=True, key_file=short_path / "keys.json")
    keys, path = build_keys(settings), short_path / "state" / "m.sock"
    takeover_done = asyncio.Event()
    async with replaceable(path, settings, [], keys, takeover_done.set) as handover:
        keys.renew("inference")
        successor = await asyncio.to_thread(_connect, path)
        assert successor is not None
        successor_keys = build_keys(settings, handed_tokens=successor.tokens)
        assert keys.inference is not None
        assert successor_keys.inference is not None
        assert successor_keys.inference.token == keys.inference.token
        keys.renew("inference")
        takeover_task = asyncio.ensure_future(successor.take_over())
        await takeover_done.wait()
        keys.hand_over()
        with pytest.raises(Unavailable, match="over a new connection"):
            keys.renew("inference")
        handover.confirm()
        await takeover_task
        successor_keys.adopt_tokens(successor.tokens)
        assert (
            generated_tokens(successor_keys, settings).keys()
            == generated_tokens(keys, settings).keys()
        )
        assert successor_keys.inference.token == keys.inference.token
        assert json.loads(settings.key_file.read_text())["inference"]["key"] == keys.inference.token
        successor.close()


@as_root
@pytest.mark.parametrize("foreign_file", ["", "m.key", "peer"])
def test_another_users_server_is_not_taken_over(short_path: Path, foreign_file: str) -> None:
    path = short_path / "state" / "m.sock"
    path.parent.mkdir(mode=0o700)
    path.with_suffix(".key").write_text("0" * 64)
    if foreign_file != "peer":
        os.chown(path.parent / foreign_file, OTHER_UID, OTHER_UID)
    with bind_unix(str(path), "state_dir") as listening:
        os.seteuid(OTHER_UID if foreign_file == "peer" else 0)
        try:
            listening.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(SettingError, match=rf"another user \(uid {OTHER_UID}\)"):
            _connect(path)
        listening.setblocking(False)
        try:
            request_socket, _ = listening.accept()
        except BlockingIOError:
            assert foreign_file != "peer"
        else:
            assert request_socket.recv(100) == b""  # The secret was not sent.
            request_socket.close()


@pytest.mark.parametrize(
    "answer",
    [
        "1",
        "[]",
        '{"format": 1}',
        '{"format": 1, "version": "1", "sockets": [["a"]]}',
        '{"tokens": []}',
        '{"tokens": {"api": "x"}}',
    ],
)
def test_an_invalid_handover_answer_is_an_error(short_path: Path, answer: str) -> None:
    path = short_path / "m.sock"
    path.with_suffix(".key").write_text("0" * 64)
    path.with_suffix(".key").chmod(0o600)
    line = answer.replace('{"tokens"', '{"format": 1, "version": "1", "sockets": [], "tokens"')
    with bind_unix(str(path), "state_dir") as listening, ThreadPoolExecutor(1) as pool:
        listening.listen()
        connected = pool.submit(_connect, path)
        request_socket, _ = listening.accept()
        with request_socket, request_socket.makefile("rb") as lines:
            assert lines.readline() == b"0" * 64 + b"\n"
            request_socket.sendall(line.encode() + b"\n")
            with pytest.raises(SettingError, match=r"m\.sock does not answer as tsx does"):
                connected.result()


def test_a_unix_socket_removed_by_the_old_server_is_recreated(short_path: Path) -> None:
    address = Address("", 0, "unix", str(short_path / "i.sock"))
    old_listener = Listener(address, ["inference"])
    old_listener.listen()
    new = Listener(address, ["inference"], PassedSocket(old_listener.sock.dup(), is_owned=True))
    old_listener.close()
    new.take_over()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address.path)
        new.sock.accept()[0].close()
    new.close()
    assert not Path(address.path).exists()
