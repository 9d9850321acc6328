"""Servers at unix sockets and at https addresses, and the commands that talk to them, as a person
has them.
"""

from __future__ import annotations

import contextlib
import http.client
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cli.conftest import Ended, Run
from tests.support.certificates import Pair, make_certificate
from tests.support.models import make_model
from tests.support.servers import FREE_GRPC_PORTS, Running, serving
from tsx_cli.bench.load.results import read_results
from tsx_cli.common.client import Server
from tsx_cli.common.failure import CliError
from tsx_cli.serve.server import with_addresses
from tsx_runtime.settings.schema import Settings

ECHO = "def handle(data, context):\n    return [next(iter(row.values())) for row in data or []]\n"
ROLES = ("inference", "management", "metrics")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("at")
    make_model(place / "echo.mar", ECHO)
    (place / "words.txt").write_text("over there")
    return place


@pytest.fixture(scope="module")
def pair(processes: None, place: Path) -> Pair:
    return make_certificate(place)


@pytest.fixture(scope="module")
def at_sockets(processes: None, place: Path, session_cache: Path) -> Iterator[Running]:
    addresses = {f"TSX_{role.upper()}_ADDRESS": f"unix:{place / role}.sock" for role in ROLES}
    with serving(
        ["serve", "echo.mar"],
        place,
        {"TSX_CACHE_DIR": str(session_cache), "TSX_WORKER_PRELOAD": "false", **addresses},
    ) as running:
        yield running
        assert running.stop() == 0
    assert not list(place.glob("*.sock"))


@pytest.fixture(scope="module")
def with_tls(place: Path, pair: Pair, session_cache: Path) -> Iterator[Running]:
    words = [f"--set={role}_address=https://127.0.0.1:0" for role in ROLES]
    words += [
        f"--set=certificate_file={pair.certificate}",
        f"--set=private_key_file={pair.key}",
        "--set=enable_grpc_ssl=true",
    ]
    with serving(
        ["serve", "echo.mar", *words, *FREE_GRPC_PORTS],
        place,
        {"TSX_CACHE_DIR": str(session_cache), "TSX_WORKER_PRELOAD": "false"},
    ) as running:
        yield running
        with client_of(
            running, pair
        ) as idle:  # it does not read, so it never agrees to the end of TLS
            idle.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(12) == b"HTTP/1.1 200"
            assert running.stop() == 0
        assert "Traceback" not in running.log


@contextlib.contextmanager
def client_of(server: Running, pair: Pair, **versions: ssl.TLSVersion) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=pair.certificate)
    for name, version in versions.items():
        setattr(context, name, version)
    host, _, port = server.address("predictions").removeprefix("https://").partition(":")
    with (
        socket.create_connection((host, int(port)), 30) as plain,
        context.wrap_socket(plain, server_hostname=host) as client,
    ):
        yield client


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("server", ["at_sockets", "with_tls"])
def test_the_curl_line_works_as_it_stands(server: str, request: pytest.FixtureRequest) -> None:
    running: Running = request.getfixturevalue(server)
    words = shlex.split(running.lines[-1].removeprefix("try: "))
    assert ("--unix-socket" if server == "at_sockets" else "--cacert") in words
    answer = subprocess.run(
        [words[0], "--silent", "--fail", *words[1:]], capture_output=True, check=True, timeout=30
    ).stdout
    assert b"Healthy" in answer


def test_the_commands_talk_to_unix_sockets(at_sockets: Running, run: Run, place: Path) -> None:
    assert at_sockets.address("predictions") == f"unix:{place}/inference.sock"
    ended = run("predict", "echo", place / "words.txt", "--url", at_sockets.address("predictions"))
    assert (ended.code, ended.out) == (0, "over there")
    ended = run("models", "list", "--url", at_sockets.address("models"))
    assert ended.code == 0
    assert "echo" in ended.out
    ended = run("models", "scale", "nobody", 1, "--url", at_sockets.address("models"))
    assert ended.code == 1
    assert "nobody" in ended.err


def test_a_unix_socket_is_for_its_user_alone_and_takes_any_host(
    at_sockets: Running, place: Path
) -> None:
    assert stat.S_IMODE((place / "management.sock").stat().st_mode) == 0o600
    with contextlib.closing(http.client.HTTPConnection("evil.org")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(place / "management.sock"))
        connection.request("GET", "/models")
        assert connection.getresponse().status == 200


def test_the_commands_talk_to_https_addresses_where_the_certificate_is_named(
    with_tls: Running, run: Run, place: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict = ["predict", "echo", place / "words.txt", "--url", with_tls.address("predictions")]
    ended = run(*predict)
    assert ended.code == 1
    assert "does not trust the server's certificate" in ended.err
    assert "TSX_CERTIFICATE_FILE=cert.pem" in ended.err
    monkeypatch.setenv("TSX_CERTIFICATE_FILE", str(pair.certificate))
    ended = run(*predict)
    assert (ended.code, ended.out) == (0, "over there"), ended.err
    ended = run("models", "list", "--url", with_tls.address("models"))
    assert ended.code == 0
    assert "echo" in ended.out


BENCH = (
    "--model",
    "echo",
    "--input",
    "words.txt",
    "--duration",
    0.1,
    "--warm-up",
    0,
    "--connections",
    2,
)


def benched(run: Run, place: Path, url: str, *words: object) -> Ended:
    shutil.copy(place / "words.txt", ".")
    return run("bench", "--against", url, *BENCH, *words)


def test_the_load_generator_asks_unix_sockets_too(
    at_sockets: Running, run: Run, place: Path
) -> None:
    url = at_sockets.address("predictions")
    ended = benched(run, place, url, "--json", "out.json")
    assert ended.code == 0, ended.err
    reported = read_results(Path("out.json"))
    assert (reported.against, reported.trials[0].points[0].error_rate) == (url, 0)
    gone = benched(run, place, f"unix:{place}/nobody.sock")
    assert (gone.code, f"at unix:{place}/nobody.sock" in gone.err) == (1, True)


@pytest.mark.parametrize("protocol", ["tsx", "grpc"])
def test_the_load_generator_speaks_tls_where_the_certificate_is_named(
    with_tls: Running,
    run: Run,
    place: Path,
    pair: Pair,
    protocol: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = (
        f"https://{with_tls.address('gRPC predictions')}"
        if protocol == "grpc"
        else with_tls.address("predictions")
    )
    ended = benched(run, place, url, "--protocol", protocol)
    assert ended.code == 1
    assert "does not trust the server's certificate" in ended.err
    assert "--certificate FILE" in ended.err
    ended = benched(run, place, url, "--protocol", protocol, "--certificate", pair.certificate)
    assert ended.code == 0, ended.err
    if protocol == "tsx":
        monkeypatch.setenv("TSX_CERTIFICATE_FILE", str(pair.certificate))
        ended = benched(run, place, url)
        assert ended.code == 0, "as the other commands find it"
        ended = benched(run, place, url.replace("https", "http"))
        assert "need https" in ended.err


def refusal_of(greet: Callable[[socket.socket], object], certificate: Path | None = None) -> str:
    """What a command says of a server that does not get beyond its first bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                greet(connection)
                connection.recv(65536)

        peer = threading.Thread(target=accept, daemon=True)
        peer.start()
        with pytest.raises(CliError) as caught:
            Server(f"https://127.0.0.1:{listener.getsockname()[1]}", certificate=certificate).call(
                "GET", "/ping"
            )
        peer.join(30)
    return caught.value.message


@pytest.mark.usefixtures("processes")
def test_every_doubt_about_a_certificate_is_reported_with_the_next_step(tmp_path: Path) -> None:
    assert "does its address begin with http://?" in refusal_of(
        lambda plain: plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    )
    other = make_certificate(tmp_path, hosts="DNS:models.example.org")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*other)
    greet = partial(context.wrap_socket, server_side=True)
    assert "set certificate_file to it" in refusal_of(greet)
    assert "a name that the certificate has" in refusal_of(greet, other.certificate)
    with pytest.raises(CliError, match="certificate_file: cannot read"):
        Server("https://127.0.0.1:1", certificate=tmp_path / "none").call("GET", "/ping")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_spoken(with_tls: Running, pair: Pair, version: ssl.TLSVersion) -> None:
    with client_of(with_tls, pair, minimum_version=version, maximum_version=version) as client:
        assert client.version() == version.name.replace("v1_", "v1.")


def test_what_is_not_tls_does_no_harm(with_tls: Running, pair: Pair) -> None:
    host, _, port = with_tls.address("predictions").removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port)), 30) as plain:
        plain.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := plain.recv(1000):
                answer += part
        assert b"HTTP/1.1 200" not in answer
    with client_of(with_tls, pair) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"


def test_host_and_port_options_keep_the_scheme_and_replace_a_unix_socket() -> None:
    settings = Settings(
        inference_address="https://127.0.0.1:1",
        management_address="unix:/a.sock",
        metrics_address="unix:/b.sock",
    )
    reported = with_addresses(
        settings, "localhost", {"inference": 2, "management": 3, "metrics": 4}
    )
    assert [getattr(reported, f"{role}_address") for role in ROLES] == [
        "https://localhost:2",
        "http://localhost:3",
        "http://localhost:4",
    ]
    assert with_addresses(settings, None, dict.fromkeys(ROLES)) == settings
    with pytest.raises(
        CliError,
        match=r"unix:/a\.sock, which has no host",
    ):
        with_addresses(settings, "localhost", dict.fromkeys(ROLES))
