"""The way to a server: addresses, paths, errors."""

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
from tsx_cli.common.options import _served
from tsx_cli.main import app


@pytest.fixture
def nobody(free_ports: Callable[[int], list[int]]) -> str:
    """An address where nothing listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


def test_segments_and_queries_are_quoted() -> None:
    assert (
        path("models", "a/b c", url="x y.mar", workers=None, synchronous=True)
        == "/models/a%2Fb%20c?url=x+y.mar&synchronous=true"
    )
    assert path("models") == "/models"


def test_a_server_that_is_not_there_is_reported_with_the_command_that_starts_it(
    nobody: str,
) -> None:
    with pytest.raises(
        CliError, match=f"no server answers at {nobody}"
    ):
        Server(nobody).call("GET", "/ping")


def test_a_server_that_has_its_port_and_does_not_answer_yet_is_waited_for() -> None:
    with socket.socket() as bound:  # as a server has it while its models load
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(CliError) as caught:
            Server(url).call("GET", "/ping")
    assert "once all its models are loaded" in caught.value.message
    assert caught.value.message.endswith(
        "; if none runs, start one with `tsx serve MODEL`, or give its address with --url"
    )
    with pytest.raises(CliError) as caught:
        Server(url).call("GET", "/ping")
    assert "models are loaded" not in caught.value.message


@pytest.mark.parametrize(
    "command",
    [["models", "list"], ["models", "describe", "x"], ["predict", "x", str(DIGITS / "README.md")]],
)
def test_every_client_command_says_that_no_server_answers(
    run: Run, nobody: str, command: list[str]
) -> None:
    ended = run(*command, "--url", nobody)
    assert ended.code == 1
    assert ended.err.startswith(f"Error: no server answers at {nobody}")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "command", [["register", "a.mar"], ["replace", "a.mar"], ["unregister", "a"]]
)
def test_a_server_that_registers_no_models_says_so(
    run: Run, tmp_path: Path, command: list[str]
) -> None:
    with running_server(make_settings(tmp_path, enable_model_api=False)) as server:
        ended = run("models", *command, "--url", str(server.management.base_url))
    assert ended.code == 1
    assert (
        "enable_model_api = true"
        in ended.err
    )


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://x:99999"])
def test_what_is_no_address_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        Server(url)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\n\r\n<ow!>",
            "502 Bad Gateway: <ow!>",
        ),
        (
            b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n",
            "500 Internal Server Error",
        ),
        (
            b"HTTP/1.1 404 x\r\ncontent-length: 31\r\n\r\n" + b'{"code":404,"message":"no: x" }\n',
            "no: x",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "did not answer GET /ping"),
        (b"", "did not answer GET /ping"),
    ],
)
def test_what_comes_back_instead_of_an_answer_is_reported(answer: bytes, message: str) -> None:
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
    ["models", "list"],
    *(
        ["models", verb, "m"]
        for verb in ("describe", "register", "replace", "unregister", "rollback")
    ),
    *(["models", verb, "m"] for verb in ("traffic", "label", "rollout", "shadow", "record")),
    ["models", "scale", "m", "1"],
    ["models", "set", "m", "batch_size=2"],
    ["models", "set-default", "m", "--version", "1"],
    ["models", "rollout", "m", "--version", "2.0", "--watch"],
    ["jobs", "list"],
    ["jobs", "show", "j"],
    ["jobs", "cancel", "j"],
    ["jobs", "retry", "--all"],
    ["explain", "r"],
    ["slowest"],
]
BODIES = [b"<html>", b"[" * 100_000, b'"\xff"', b"null", b'"x"', b"1", b"[]"]
PREDICTIONS = (["predict", "m", "--sample"], ["predict", "m", __file__])
KEYS = ("models", "jobs", "requests", "milliseconds", "status", "traffic", "table", "log", "id")
WRONG_TYPES = json.dumps(dict.fromkeys(KEYS, 1)).encode()


@pytest.mark.parametrize("body", BODIES)
def test_an_answer_that_is_not_the_json_that_is_read_is_an_error(body: bytes) -> None:
    with pytest.raises(CliError, match="the server's answer cannot be read"):
        Response.whole(body, "application/json").json()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_say_what_they_cannot_read(
    run: Run, answering: Answering, command: list[str]
) -> None:
    shows_nothing = command == ["jobs", "cancel", "j"]
    for body in (b"[1]",) if shows_nothing else (b"[1]", WRONG_TYPES):
        ended = run(*command, "--url", answering(200, body))
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("Error: the server's answer cannot be read (")


@pytest.mark.parametrize("command", [*COMMANDS, *PREDICTIONS, ["replay"]], ids=" ".join)
def test_help_names_the_variables_of_a_servers_tokens(run: Run, command: list[str]) -> None:
    shown = run(*command[: 2 if command[0] in ("models", "jobs") else 1], "--help").out
    assert "TSX_MANAGEMENT_TOKEN" in shown
    assert "TSX_INFERENCE_TOKEN" in shown


@pytest.mark.parametrize("command", [*COMMANDS, *PREDICTIONS], ids=" ".join)
def test_a_redirect_fails_every_command(run: Run, answering: Answering, command: list[str]) -> None:
    url = answering(301, b"", location="https://other/")
    ended = run(*command, "--url", url)
    assert (ended.code, ended.out) == (1, "")
    assert f"Error: {url} answers /" in ended.err
    assert "301 and names https://other/" in ended.err


def test_only_a_jobs_recorded_answer_is_written(
    run: Run, answering: Answering, tmp_path: Path
) -> None:
    record = json.dumps({"state": "done", "status": 404}).encode()
    ended = run("jobs", "show", "j", "--output", "answer", "--url", answering(200, record))
    assert (ended.code, (tmp_path / "answer").exists()) == (1, False)
    assert ended.err.startswith("Error: the server answered 200 OK")


@pytest.mark.parametrize("status", [204, 300, 304, 399])
def test_only_a_status_of_2xx_is_success(answering: Answering, status: int) -> None:
    server = Server(answering(status, b""))
    if status < 300:
        assert server.call("GET", "/ping").status == status
        return
    with pytest.raises(RequestFailed) as caught:
        server.call("GET", "/ping")
    assert caught.value.status == status


def test_an_error_whose_text_is_nested_too_deeply_is_an_error_all_the_same() -> None:
    assert _failure(500, b"[" * 100_000).status == 500
    assert error_text(b"[" * 100_000) == "[" * 200


def test_completion_offers_nothing_where_the_answer_is_none(answering: Answering) -> None:
    complete = _served("management")
    for body in (*BODIES, b"{}", b'{"models": 1}', b'{"models": [1]}'):
        context = typer.Context(typer.main.get_command(app))
        context.params = {"url": answering(200, body), "config": None}
        assert complete(context, "") == []


def test_a_traceback_in_an_error_stands_apart_from_its_message() -> None:
    body = json.dumps(
        {
            "code": 500,
            "type": "x",
            "message": "it did not load\nTraceback (most recent call last):\n  File\nE: why\n",
        }
    )
    error = _failure(500, body.encode())
    assert error.message == "it did not load"
    assert error.traceback == "Traceback (most recent call last):\n  File\nE: why"


def test_a_hint_leaves_no_doubled_punctuation() -> None:
    error = _failure(
        404, json.dumps({"code": 404, "type": "x", "message": "No such thing."}).encode()
    )
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
