"""The client of the commands: addresses, paths and errors."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import DIGITS, Answering, Run
from tests.runtime.conftest import make_settings, running_server
from tsx_cli.common.client import RequestFailed, Response, Server, _failure, error_text, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import _complete_models_of
from tsx_cli.main import app


@pytest.fixture
def free_url(free_ports: Callable[[int], list[int]]) -> str:
    """Return an address where nothing listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


def test_segments_and_queries_are_quoted() -> None:
    assert (
        path("models", "a/b c", url="x y.mar", workers=None, synchronous=True)
        == "/models/a%2Fb%20c?url=x+y.mar&synchronous=true"
    )
    assert path("models") == "/models"


def test_a_missing_server_is_reported_with_the_command_that_starts_it(free_url: str) -> None:
    with pytest.raises(CliError, match=f"no server answers at {free_url}"):
        Server(free_url).call("GET", "/ping")


def test_the_error_of_a_starting_server_says_that_its_models_load() -> None:
    # A server binds its port before its models load.
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound_socket.getsockname()[1]}"
        with pytest.raises(CliError) as caught:
            Server(url).call("GET", "/ping")
    assert "once all its models are loaded" in caught.value.message
    assert "if none runs, start one with `tsx serve MODEL`" in caught.value.message
    with pytest.raises(CliError) as caught:
        Server(url).call("GET", "/ping")
    assert "models are loaded" not in caught.value.message


@pytest.mark.parametrize(
    "command",
    ["models list", "models describe x", f"predict x {DIGITS}/README.md"],
)
def test_every_client_command_reports_a_missing_server(
    run: Run, free_url: str, command: str
) -> None:
    result = run(command, "--url", free_url)
    assert result.code == 1
    assert result.err.startswith(f"Error: no server answers at {free_url}")


@pytest.mark.usefixtures("processes")
def test_the_error_of_a_disabled_model_api_names_its_setting(run: Run, tmp_path: Path) -> None:
    with running_server(make_settings(tmp_path, enable_model_api=False)) as server:
        for command in ("register a.mar", "replace a.mar", "unregister a"):
            result = run(f"models {command} --url {server.management.base_url}")
            assert result.code == 1
            assert "enable_model_api = true" in result.err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://x:99999"])
def test_an_invalid_address_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        Server(url)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\n\r\n<ow!>", "502 Bad Gateway: <ow!>"),
        (b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n", "500 Internal Server Error"),
        (
            b"HTTP/1.1 404 x\r\ncontent-length: 31\r\n\r\n" + b'{"code":404,"message":"no: x" }\n',
            "no: x",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "did not answer GET /ping"),
        (b"", "did not answer GET /ping"),
    ],
)
def test_an_invalid_response_is_reported(answer: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = threading.Thread(target=answer_once, args=(listener, answer))
        peer.start()
        with pytest.raises(CliError) as caught:
            Server(f"http://127.0.0.1:{listener.getsockname()[1]}").call("GET", "/ping")
        peer.join(10)
    assert message in caught.value.message


def test_a_connection_is_kept_until_the_server_closes_it() -> None:
    peers: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}")
        for requests in (2, 1):
            thread = threading.Thread(target=answer_in_turn, args=(listener, requests, peers))
            thread.start()
            for _ in range(requests):
                assert server.exchange("POST", "/x", [("a", "é")], b"").body() == b"ok"
            thread.join(10)
    assert len(peers) == 2


COMMANDS = [
    "models list",
    *(
        f"models {verb} m"
        for verb in (
            *("describe", "register", "replace", "unregister", "rollback"),
            *("traffic", "label", "rollout", "shadow", "record"),
        )
    ),
    "models scale m 1",
    "models set m batch_size=2",
    "models set-default m --version 1",
    "models rollout m --version 2.0 --watch",
    "jobs list",
    "jobs show j",
    "jobs cancel j",
    "jobs retry --all",
    "explain r",
    "slowest",
]
BODIES = [b"<html>", b"[" * 100_000, b'"\xff"', b"null", b'"x"', b"1", b"[]"]
PREDICTIONS = ("predict m --sample", f"predict m {__file__}")
KEYS = ("models", "jobs", "requests", "milliseconds", "status", "traffic", "table", "log", "id")
WRONG_TYPES = json.dumps(dict.fromkeys(KEYS, 1)).encode()


@pytest.mark.parametrize("body", BODIES)
def test_a_response_that_is_not_the_expected_json_is_an_error(body: bytes) -> None:
    with pytest.raises(CliError, match="the server's answer cannot be read"):
        Response.complete(body, "application/json").json()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_an_unreadable_response(
    run: Run, answering: Answering, command: str
) -> None:
    for body in (b"[1]",) if command == "jobs cancel j" else (b"[1]", WRONG_TYPES):
        result = run(command, "--url", answering(200, body))
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("Error: the server's answer cannot be read (")


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, *PREDICTIONS, "replay"])
def test_help_names_the_variables_of_a_servers_tokens(run: Run, command: str) -> None:
    arguments = command.split()
    help_text = run(*arguments[: 2 if arguments[0] in ("models", "jobs") else 1], "--help").out
    assert "TSX_MANAGEMENT_TOKEN" in help_text
    assert "TSX_INFERENCE_TOKEN" in help_text


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, *PREDICTIONS])
def test_a_redirect_fails_every_command(run: Run, answering: Answering, command: str) -> None:
    url = answering(301, b"", location="https://other/")
    result = run(command, "--url", url)
    assert (result.code, result.out) == (1, "")
    assert f"Error: {url} answers /" in result.err
    assert "301 and names https://other/" in result.err


def test_only_a_jobs_recorded_response_is_written(
    run: Run, answering: Answering, tmp_path: Path
) -> None:
    record = json.dumps({"state": "done", "status": 404}).encode()
    result = run("jobs show j --output answer --url", answering(200, record))
    assert (result.code, (tmp_path / "answer").exists()) == (1, False)
    assert result.err.startswith("Error: the server answered 200 OK")


@pytest.mark.parametrize("status", [204, 300, 304, 399])
def test_only_2xx_statuses_are_success(answering: Answering, status: int) -> None:
    server = Server(answering(status, b""))
    if status < 300:
        assert server.call("GET", "/ping").status == status
        return
    with pytest.raises(RequestFailed) as caught:
        server.call("GET", "/ping")
    assert caught.value.status == status


def test_an_error_with_deeply_nested_json_is_reported() -> None:
    assert _failure(500, b"[" * 100_000).status == 500
    assert error_text(b"[" * 100_000) == "[" * 200


def test_completion_offers_nothing_after_an_invalid_response(answering: Answering) -> None:
    complete = _complete_models_of("management")
    for body in (*BODIES, b"{}", b'{"models": 1}', b'{"models": [1]}'):
        context = typer.Context(typer.main.get_command(app))
        context.params = {"url": answering(200, body), "config": None}
        assert complete(context, "") == []


def failure(status: int, message: str) -> RequestFailed:
    body = {"code": status, "type": "x", "message": message}
    return _failure(status, json.dumps(body).encode())


def test_the_traceback_in_an_error_is_not_part_of_its_message() -> None:
    traceback = "Traceback (most recent call last):\n  File\nE: why"
    error = failure(500, f"it did not load\n{traceback}\n")
    assert (error.message, error.traceback) == ("it did not load", traceback)


def test_a_hint_does_not_double_the_punctuation() -> None:
    error = failure(404, "No such thing.")
    assert error.hinted("do this").message == "No such thing; do this"


def answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


def answer_in_turn(listener: socket.socket, requests: int, peers: list[int]) -> None:
    connection, (_, port) = listener.accept()
    peers.append(port)
    with connection:
        for _ in range(requests):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
