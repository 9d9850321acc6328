"""Commands that connect to unix sockets and https addresses."""

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

from tests.cli.conftest import CommandResult, Run
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
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("at")
    make_model(directory / "echo.mar", ECHO)
    (directory / "words.txt").write_text("over there")
    return directory


@pytest.fixture(scope="module")
def pair(processes: None, directory: Path) -> Pair:
    return make_certificate(directory)


@pytest.fixture(scope="module")
def environment(session_cache: Path) -> dict[str, str]:
    return {"TSX_CACHE_DIR": str(session_cache), "TSX_WORKER_PRELOAD": "false"}


@pytest.fixture(scope="module")
def unix_server(processes: None, directory: Path, environment: dict[str, str]) -> Iterator[Running]:
    addresses = {f"TSX_{role.upper()}_ADDRESS": f"unix:{directory / role}.sock" for role in ROLES}
    with serving(["serve", "echo.mar"], directory, environment | addresses) as running:
        yield running
        assert running.stop() == 0
    assert not list(directory.glob("*.sock"))


@pytest.fixture(scope="module")
def tls_server(directory: Path, pair: Pair, environment: dict[str, str]) -> Iterator[Running]:
    arguments = [f"--set={role}_address=https://127.0.0.1:0" for role in ROLES]
    arguments += [
        f"--set=certificate_file={pair.certificate}",
        f"--set=private_key_file={pair.key}",
        "--set=enable_grpc_ssl=true",
    ]
    command = ["serve", "echo.mar", *arguments, *FREE_GRPC_PORTS]
    with serving(command, directory, environment) as running:
        yield running
        # This idle client never acknowledges the TLS shutdown, since it does not read.
        with client_of(running, pair) as idle:
            idle.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(12) == b"HTTP/1.1 200"
            assert running.stop() == 0
        assert "Traceback" not in running.log


def host_and_port(server: Running) -> tuple[str, int]:
    host, _, port = server.address("predictions").removeprefix("https://").partition(":")
    return host, int(port)


@contextlib.contextmanager
def client_of(server: Running, pair: Pair, **versions: ssl.TLSVersion) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=pair.certificate)
    for name, version in versions.items():
        setattr(context, name, version)
    host, port = host_and_port(server)
    with (
        socket.create_connection((host, port), 30) as plain,
        context.wrap_socket(plain, server_hostname=host) as client,
    ):
        yield client


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("server", ["unix_server", "tls_server"])
def test_the_printed_curl_command_works(server: str, request: pytest.FixtureRequest) -> None:
    running: Running = request.getfixturevalue(server)
    arguments = shlex.split(running.lines[-1].removeprefix("try: "))
    assert ("--unix-socket" if server == "unix_server" else "--cacert") in arguments
    command = [arguments[0], "--silent", "--fail", *arguments[1:]]
    response = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert b"Healthy" in response.stdout


def check_commands(run: Run, server: Running, directory: Path) -> None:
    """Predict and list the models of a server."""
    predict = f"predict echo {directory}/words.txt"
    result = run(f"{predict} --url {server.address('predictions')}")
    assert (result.code, result.out) == (0, "over there"), result.err
    result = run(f"models list --url {server.address('models')}")
    assert (result.code, "echo" in result.out) == (0, True)


def test_the_commands_support_unix_sockets(unix_server: Running, run: Run, directory: Path) -> None:
    assert unix_server.address("predictions") == f"unix:{directory}/inference.sock"
    check_commands(run, unix_server, directory)
    result = run(f"models scale nobody 1 --url {unix_server.address('models')}")
    assert (result.code, "nobody" in result.err) == (1, True)


def test_a_unix_socket_is_private_to_its_user_and_accepts_any_host_header(
    unix_server: Running, directory: Path
) -> None:
    path = directory / "management.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with contextlib.closing(http.client.HTTPConnection("evil.org")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", "/models")
        assert connection.getresponse().status == 200


def test_the_commands_support_https_with_a_certificate(
    tls_server: Running, run: Run, directory: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(f"predict echo {directory}/words.txt --url {tls_server.address('predictions')}")
    assert result.code == 1
    assert "does not trust the server's certificate" in result.err
    assert "TSX_CERTIFICATE_FILE=cert.pem" in result.err
    monkeypatch.setenv("TSX_CERTIFICATE_FILE", str(pair.certificate))
    check_commands(run, tls_server, directory)


def bench(run: Run, directory: Path, url: str, arguments: str = "") -> CommandResult:
    shutil.copy(directory / "words.txt", ".")
    load = "--model echo --input words.txt --duration 0.1 --warm-up 0 --connections 2"
    return run(f"bench --against {url} {load} {arguments}")


def test_the_load_generator_supports_unix_sockets(
    unix_server: Running, run: Run, directory: Path
) -> None:
    url = unix_server.address("predictions")
    result = bench(run, directory, url, "--json out.json")
    assert result.code == 0, result.err
    results = read_results(Path("out.json"))
    assert (results.against, results.trials[0].points[0].error_rate) == (url, 0)
    missing_socket = f"unix:{directory}/nobody.sock"
    result = bench(run, directory, missing_socket)
    assert (result.code, f"at {missing_socket}" in result.err) == (1, True)


@pytest.mark.parametrize("protocol", ["tsx", "grpc"])
def test_the_load_generator_supports_tls_with_a_certificate(
    tls_server: Running,
    run: Run,
    directory: Path,
    pair: Pair,
    protocol: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = tls_server.address("predictions")
    if protocol == "grpc":
        url = f"https://{tls_server.address('gRPC predictions')}"
    arguments = f"--protocol {protocol}"
    result = bench(run, directory, url, arguments)
    assert result.code == 1
    assert "does not trust the server's certificate" in result.err
    assert "--certificate FILE" in result.err
    result = bench(run, directory, url, f"{arguments} --certificate {pair.certificate}")
    assert result.code == 0, result.err
    if protocol == "tsx":
        monkeypatch.setenv("TSX_CERTIFICATE_FILE", str(pair.certificate))
        assert bench(run, directory, url).code == 0
        assert "need https" in bench(run, directory, url.replace("https", "http")).err


def refusal_of(greet: Callable[[socket.socket], object], certificate: Path | None = None) -> str:
    """Return the error of a client whose peer runs `greet`, reads once, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                greet(connection)
                connection.recv(65536)

        peer = threading.Thread(target=accept, daemon=True)
        peer.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(CliError) as caught:
            Server(url, certificate=certificate).call("GET", "/ping")
        peer.join(30)
    return caught.value.message


@pytest.mark.usefixtures("processes")
def test_each_problem_of_a_certificate_is_reported_with_a_remedy(tmp_path: Path) -> None:
    plain = refusal_of(lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    assert "does its address begin with http://?" in plain
    foreign = make_certificate(tmp_path, hosts="DNS:models.example.org")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*foreign)
    greet = partial(context.wrap_socket, server_side=True)
    assert "set certificate_file to it" in refusal_of(greet)
    assert "a name that the certificate has" in refusal_of(greet, foreign.certificate)
    with pytest.raises(CliError, match="certificate_file: cannot read"):
        Server("https://127.0.0.1:1", certificate=tmp_path / "none").call("GET", "/ping")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_1_3_are_supported(
    tls_server: Running, pair: Pair, version: ssl.TLSVersion
) -> None:
    with client_of(tls_server, pair, minimum_version=version, maximum_version=version) as client:
        assert client.version() == version.name.replace("v1_", "v1.")


def test_a_client_without_tls_does_not_disturb_the_server(tls_server: Running, pair: Pair) -> None:
    with socket.create_connection(host_and_port(tls_server), 30) as plain:
        plain.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        response = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := plain.recv(1000):
                response += chunk
        assert b"HTTP/1.1 200" not in response
    with client_of(tls_server, pair) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"


def test_host_and_port_options_keep_the_scheme_and_replace_a_unix_socket() -> None:
    settings = Settings(
        inference_address="https://127.0.0.1:1",
        management_address="unix:/a.sock",
        metrics_address="unix:/b.sock",
    )
    ports = {"inference": 2, "management": 3, "metrics": 4}
    changed = with_addresses(settings, "localhost", ports)
    assert [getattr(changed, f"{role}_address") for role in ROLES] == [
        "https://localhost:2",
        "http://localhost:3",
        "http://localhost:4",
    ]
    assert with_addresses(settings, None, dict.fromkeys(ROLES)) == settings
    with pytest.raises(CliError, match=r"unix:/a\.sock, which has no host"):
        with_addresses(settings, "localhost", dict.fromkeys(ROLES))
