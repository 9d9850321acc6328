"""The server process: its start, its answers, and a stop that completes accepted requests."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support import forked
from tests.support.clients.rawhttp import RawConnection, chunked, request
from tests.support.models import make_model
from tests.support.servers import DEADLINE, FREE_PORTS, Running, clean, serving, tsx
from tsx_runtime.server.uvicorn_servers import _wait_until_listening
from tsx_runtime.targets import health

pytestmark = pytest.mark.usefixtures("processes")

HANDLER = """
import time
from pathlib import Path

def handle(data, context):
    return None if data is None else [act(index, bytes(row["body"]).decode(), context) for index, row in enumerate(data)]

def act(index, word, context):
    kind, _, file = word.partition(" ")
    if kind == "large":
        return b"x" * 6_000_000
    if kind == "stream":
        from ts.handler_utils.utils import send_intermediate_predict_response

        send_intermediate_predict_response(["a"], {index: context.get_request_id(index)}, "Intermediate", 200, context)
    if file:
        Path(file + ".begun").touch()
        deadline = time.monotonic() + 60  # a failed test must not hold the worker
        while not Path(file).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
    return "done"
"""
PREDICT = "/predictions/patient"
STREAM = [(b"Content-Type", b"application/octet-stream")]
CHUNKED = [*STREAM, (b"Transfer-Encoding", b"chunked")]
BROKEN = "import not_there\n"


def predict(text: str) -> bytes:
    return request(target=PREDICT.encode(), headers=STREAM, body=text.encode())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    make_model(tmp_path / "patient", HANDLER)
    with ExitStack() as stack:

        def start(**settings: object) -> Running:
            arguments = [f"--set={name}={value}" for name, value in settings.items()]
            arguments += [] if "inference_address" in settings else FREE_PORTS
            environment = {"TSX_CACHE_DIR": str(tmp_path / "cache")}
            return stack.enter_context(
                serving(["serve", "patient", *arguments], tmp_path, environment)
            )

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[[Running], RawConnection]]:
    with ExitStack() as stack:

        def connect(server: Running) -> RawConnection:
            return stack.enter_context(RawConnection(address_of(server)))

        yield connect


@pytest.fixture
def ask() -> Iterator[Callable[..., Callable[[], httpx.Response]]]:
    """Return a function that starts a prediction and returns a function that waits for it."""
    with ThreadPoolExecutor() as clients:

        def ask(server: Running, text: str) -> Callable[[], httpx.Response]:
            url = server.address("predictions") + PREDICT
            return clients.submit(httpx.post, url, content=text, timeout=DEADLINE).result

        yield ask


def address_of(server: Running) -> tuple[str, int]:
    host, _, port = server.address("predictions").removeprefix("http://").partition(":")
    return host, int(port)


def get(server: Running, path: str, role: str = "predictions") -> httpx.Response:
    return httpx.get(server.address(role) + path, timeout=DEADLINE)


def is_refused(server: Running) -> bool:
    try:
        socket.create_connection(address_of(server), DEADLINE).close()
    except ConnectionResetError:  # the socket was closed with this client in its backlog
        return False
    except ConnectionRefusedError:
        return True
    return False


def settle(connection: RawConnection) -> None:
    """Wait until the server has read what other connections sent before."""
    connection.send(request(b"GET", b"/ping"))
    answer = connection.answer(b"GET")
    assert answer is not None
    assert answer.status == 200


def stop(server: Running, idle_connection: RawConnection) -> None:
    """Stop a server and wait until it has closed its idle connections."""
    settle(idle_connection)
    server.process.send_signal(signal.SIGTERM)
    assert idle_connection.answer() is None


def test_a_server_that_cannot_listen_ends_the_start():
    async def fail() -> None:
        raise OSError("no room for another socket")

    async def start() -> None:
        await asyncio.wait_for(
            _wait_until_listening(asyncio.Event(), asyncio.create_task(fail())), DEADLINE
        )

    with pytest.raises(OSError, match="no room"):
        asyncio.run(start())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_stops_the_server_gracefully(start, ask, until, tmp_path, number):
    """Send it to all processes, as service managers and terminals do."""
    server, gate = start(), tmp_path / "go"
    answer = ask(server, f"wait {gate}")
    until((tmp_path / "go.begun").exists)
    children = psutil.Process(server.process.pid).children(recursive=True)
    for process in (server.process, *children):
        process.send_signal(number)
    until(lambda: is_refused(server))
    assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    gate.touch()
    assert answer().text == "done"
    assert server.process.wait(DEADLINE) == 0
    _, remaining_processes = psutil.wait_procs(children, timeout=DEADLINE)
    assert not remaining_processes


def test_a_stopping_server_serves_until_load_balancers_notice(start, ask, until, free_ports):
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    roles = ("inference", "management", "metrics")
    server = start(shutdown_delay=600, **{f"{role}_address": address for role in roles})
    # One address serves all roles.
    paths = ("/readyz", "/models", "/metrics")
    assert [get(server, path).status_code for path in paths] == [200] * 3
    server.process.send_signal(signal.SIGTERM)
    until(lambda: get(server, "/readyz").status_code != 200)
    answer = get(server, "/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "Stopping")
    assert health.main({"TSX_MANAGEMENT_ADDRESS": server.address("models")}) == 1
    assert get(server, "/livez").status_code == 200
    assert ask(server, "now")().text == "done"
    # A second signal ends the wait.
    assert server.stop(signal.SIGINT) == 0


def test_health_probes_are_answered_until_the_last_prediction(start, ask, until, tmp_path):
    server, gate = start(), tmp_path / "go"
    answer = ask(server, f"wait {gate}")
    until((tmp_path / "go.begun").exists)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: is_refused(server))
    assert get(server, "/livez", "models").status_code == 200
    assert get(server, "/readyz", "metrics").status_code == 503
    gate.touch()
    assert answer().text == "done"
    assert server.process.wait(DEADLINE) == 0


@pytest.mark.parametrize("end", ["its time is over", "a second Ctrl-C"])
def test_requests_that_exceed_the_drain_timeout_are_refused(start, ask, until, tmp_path, end):
    server = start(drain_timeout=1 if end == "its time is over" else 600)
    answers = [ask(server, f"wait {tmp_path / 'never'}") for _ in range(3)]
    in_flight = r"\ntsx_requests_in_flight{[^}]*} 3\.0\n"
    until(lambda: re.search(in_flight, get(server, "/metrics", "metrics").text))
    until((tmp_path / "never.begun").exists)
    server.process.send_signal(signal.SIGINT)
    until(lambda: is_refused(server))
    if end == "a second Ctrl-C":
        server.process.send_signal(signal.SIGINT)
    assert server.process.wait(DEADLINE) == 0
    # A request may have started (500) or may still wait (503).
    assert sorted({answer().status_code for answer in answers}) in ([500], [500, 503])
    assert all(answer().json()["message"] for answer in answers)
    assert "Traceback" not in server.log


def test_a_stop_during_loading_ends_the_server_at_once(tmp_path, until):
    marker = tmp_path / "loading"
    make_model(
        tmp_path / "slow", f"import time\nopen({str(marker)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    arguments = [sys.executable, "-m", "tsx_cli", "serve", "slow", *FREE_PORTS]
    with forked.Popen(arguments, cwd=tmp_path, env=clean({})) as process:
        until(lambda: marker.exists() or process.poll() is not None)
        process.terminate()
        assert process.wait(DEADLINE) == 0


def test_a_failed_load_ends_the_start_with_its_reason(tmp_path):
    make_model(tmp_path / "good", HANDLER)
    make_model(tmp_path / "bad", BROKEN)
    result = tsx(["serve", "good", "bad", *FREE_PORTS], tmp_path, {})
    assert result.returncode == 1
    assert "not_there" in result.stderr


def test_a_port_in_use_and_a_missing_token_are_reported_before_models_load(tmp_path):
    make_model(tmp_path / "bad", BROKEN)
    with socket.create_server(("127.0.0.1", 0)) as used_socket:
        port = used_socket.getsockname()[1]
        for setting, reason in (
            (f"metrics_address=http://127.0.0.1:{port}", f"Port {port} on 127.0.0.1 is in use"),
            ("management_address=http://0.0.0.0:0", "management_token"),
        ):
            result = tsx(["serve", "bad", "--port", 0, f"--set={setting}"], tmp_path, {})
            assert result.returncode == 1
            assert reason in result.stderr
            assert "not_there" not in result.stderr


def test_a_stop_closes_idle_connections_and_answers_running_requests(
    start, connect, until, tmp_path
):
    server = start()
    pinged_connection, silent_connection, answered_connection, half_head_connection = (
        connect(server) for _ in range(4)
    )
    (
        stream,
        queued_connection,
        chunked_connection,
        pipelined_connection,
        half_sent,
        half_sent_chunks,
    ) = (connect(server) for _ in range(6))
    gate, body_request = tmp_path / "go", predict("halves")
    answered_connection.send(predict("now"))
    assert answered_connection.answer().body == b"done"
    half_head_connection.send(b"POST /predictions/patient HTTP/1.1\r\nHost:")
    stream.send(predict(f"stream {gate}"))
    until((tmp_path / "go.begun").exists)
    queued_connection.send(predict("next"))
    chunked_connection.send(
        request(target=PREDICT.encode(), headers=CHUNKED) + chunked([b"ne", b"xt"])
    )
    pipelined_connection.send(predict("one") + predict("two"))
    half_sent.send(body_request[:-4])
    half_sent_chunks.send(request(target=PREDICT.encode(), headers=CHUNKED) + b"4\r\nhalf\r\n")
    stop(server, pinged_connection)
    assert [
        connection.answer()
        for connection in (silent_connection, answered_connection, half_head_connection)
    ] == [None] * 3
    gate.touch()
    half_sent.send(body_request[-4:])
    half_sent_chunks.send(b"0\r\n\r\n")
    answer = stream.answer()
    assert (answer.status, answer.body, answer.complete) == (200, b"adone", True)
    for connection in (
        queued_connection,
        chunked_connection,
        pipelined_connection,
        half_sent,
        half_sent_chunks,
    ):
        answer = connection.answer()
        assert (answer.status, answer.body) == (200, b"done")
        assert answer.header(b"connection") == b"close"
    # The pipelined requests had not started; their client may send them elsewhere.
    assert [connection.answer() for connection in (stream, pipelined_connection, half_sent)] == [
        None
    ] * 3
    assert server.process.wait(DEADLINE) == 0
    assert "Traceback" not in server.log


@pytest.mark.nightly
@pytest.mark.parametrize("setting", ["body_timeout", "drain_timeout"])
def test_an_inactive_client_delays_the_stop_only_up_to_its_timeout(start, connect, setting):
    server = start(**{setting: 1})
    idle_connection, half_sent = connect(server), connect(server)
    half_sent.send(predict("halves")[:-4])
    if setting == "drain_timeout":
        deaf_connection = connect(server)
        deaf_connection.send(predict("large"))
        assert deaf_connection.sock.recv(12) == b"HTTP/1.1 200"
    stop(server, idle_connection)
    answer = half_sent.answer()
    assert answer is None or answer.status == 408
    assert server.process.wait(DEADLINE) == 0
    assert "Traceback" not in server.log
