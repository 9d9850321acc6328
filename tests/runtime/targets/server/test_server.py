"""The server as a process: it binds, answers, and ends on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support import forked
from tests.support.models import make_model
from tsx_runtime.targets.server.uvicorn_servers import _listening

pytestmark = pytest.mark.usefixtures("processes")

TIMEOUT = 90.0  # of a machine that has other things to do

SERVER = """
import json, sys
from pathlib import Path
from tsx_runtime.errors import TsxError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.targets.server.server import serve
from tsx_runtime.targets.server.startup import models_from_settings, start_model

free = "http://127.0.0.1:0"
addresses = dict.fromkeys(("inference_address", "management_address", "metrics_address"), free)
settings = Settings(**{**addresses, "worker_preload": False, "enable_grpc": False, **json.loads(sys.argv[1])})

def ready(started):
    print(json.dumps({**started.addresses, "models": [version.name for version in started.versions]}), flush=True)

try:
    serve(settings, [start_model(Path(path)) for path in sys.argv[2:]] + models_from_settings(settings), ready)
except TsxError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""

HANDLER = """
import time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    for row in data:
        if row.get("body"):
            Path(row["body"].decode() + ".begun").touch()
            while not Path(row["body"].decode()).exists():
                time.sleep(0.005)
    return ["OK"] * len(data)
"""


@contextlib.contextmanager
def server(*models: Path, **settings: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER, json.dumps(settings, default=str), *map(str, models)]
    with forked.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> dict:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def call(address: str, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=TIMEOUT)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def wait_until_refused(address: str) -> None:
    parts = urlsplit(address)
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        try:
            socket.create_connection((parts.hostname, parts.port), TIMEOUT).close()
        except ConnectionResetError:  # it was in the backlog when the socket closed
            continue
        except ConnectionRefusedError:
            return
    pytest.fail("the server still takes connections")


def wait_until_accepted(metrics: str, count: int) -> None:
    end = time.monotonic() + TIMEOUT
    while (
        re.search(
            rb"\ntsx_requests_in_flight{[^}]*} %d\.0\n" % count, call(metrics, "GET", "/metrics")[1]
        )
        is None
    ):
        assert time.monotonic() < end


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + TIMEOUT
    while not path.exists():  # a handler has no other way to tell
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_server_that_cannot_listen_ends_the_start_instead_of_keeping_it_waiting():
    async def fail() -> None:
        raise OSError("no room for another socket")

    async def start() -> None:
        await asyncio.wait_for(_listening(asyncio.Event(), asyncio.create_task(fail())), TIMEOUT)

    with pytest.raises(OSError, match="no room"):
        asyncio.run(start())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "to", ["the front end", "all its processes"]
)  # as a terminal and a service manager do
def test_on_a_signal_it_answers_what_it_accepted_and_ends_with_all_its_processes(
    tmp_path, number, to
):
    with server(make_model(tmp_path / "waiter", HANDLER)) as process:
        started = ready(process)
        assert started["models"] == ["waiter"]
        answers: list[tuple[int, bytes]] = []
        go = tmp_path / "go"
        client = threading.Thread(
            target=lambda: answers.append(
                call(started["inference"], "POST", "/predictions/waiter", str(go))
            )
        )
        client.start()
        wait_for(tmp_path / "go.begun", process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        for child in children if to == "all its processes" else []:
            child.send_signal(number)
        wait_until_refused(started["inference"])
        assert all(
            child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children
        )
        go.touch()
        client.join(TIMEOUT)
        assert answers == [(200, b"OK")]
        assert process.wait(TIMEOUT) == 0
        _, alive = psutil.wait_procs(children, timeout=TIMEOUT)
        assert not alive


def test_a_server_that_is_to_stop_takes_requests_until_balancers_have_seen_that_it_is_not_ready(
    tmp_path,
):
    with server(make_model(tmp_path / "waiter", HANDLER), shutdown_delay=600) as process:
        started = ready(process)
        assert call(started["inference"], "GET", "/readyz")[0] == 200
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + TIMEOUT
        while (answer := call(started["inference"], "GET", "/readyz"))[0] == 200:
            assert time.monotonic() < end
        assert (answer[0], json.loads(answer[1])["status"]) == (503, "Stopping")
        assert call(started["inference"], "GET", "/livez")[0] == 200
        assert call(started["inference"], "POST", "/predictions/waiter") == (200, b"OK")
        process.send_signal(signal.SIGINT)  # a person who does not want to wait for it
        assert process.wait(TIMEOUT) == 0


def test_whether_it_is_alive_can_be_asked_until_the_last_prediction_is_answered(tmp_path):
    with server(make_model(tmp_path / "waiter", HANDLER)) as process:
        started = ready(process)
        answers: list[tuple[int, bytes]] = []
        go = tmp_path / "go"
        client = threading.Thread(
            target=lambda: answers.append(
                call(started["inference"], "POST", "/predictions/waiter", str(go))
            )
        )
        client.start()
        wait_for(tmp_path / "go.begun", process)
        process.send_signal(signal.SIGTERM)
        wait_until_refused(started["inference"])
        assert call(started["management"], "GET", "/livez")[0] == 200
        assert call(started["metrics"], "GET", "/readyz")[0] == 503
        go.touch()
        client.join(TIMEOUT)
        assert answers == [(200, b"OK")]
        assert process.wait(TIMEOUT) == 0


@pytest.mark.parametrize("how", ["its time is over", "a second Ctrl-C"])
def test_what_does_not_end_in_time_is_refused_and_the_server_ends_all_the_same(tmp_path, how):
    drain = 1 if how == "its time is over" else 600
    with server(make_model(tmp_path / "waiter", HANDLER), drain_timeout=drain) as process:
        started = ready(process)
        answers: list[tuple[int, bytes]] = []
        clients = [
            threading.Thread(
                target=lambda: answers.append(
                    call(
                        started["inference"], "POST", "/predictions/waiter", str(tmp_path / "never")
                    )
                )
            )
            for _ in range(3)
        ]
        for client in clients:
            client.start()
        wait_until_accepted(started["metrics"], len(clients))
        wait_for(tmp_path / "never.begun", process)
        process.send_signal(signal.SIGINT)
        wait_until_refused(started["inference"])
        if how == "a second Ctrl-C":
            process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 0
        for client in clients:
            client.join(TIMEOUT)
        assert sorted({status for status, _ in answers}) in (
            [500],
            [500, 503],
        )  # begun, and perhaps still waiting
        assert all(json.loads(body)["message"] for _, body in answers)
        assert len(answers) == 3
        assert "Traceback" not in process.stderr.read()


def test_one_address_for_all_roles_serves_all_of_them(tmp_path, free_ports):
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    same = {f"{role}_address": address for role in ("inference", "management", "metrics")}
    make_model(tmp_path / "store" / "one", HANDLER)
    with server(model_store=tmp_path / "store", load_models=["all"], **same) as process:
        assert ready(process) == {
            "inference": address,
            "management": address,
            "metrics": address,
            "models": ["one"],
        }
        assert call(address, "POST", "/predictions/one") == (200, b"OK")
        assert call(address, "GET", "/models")[0] == 200
        assert call(address, "GET", "/metrics")[0] == 200


def test_a_stop_while_a_model_loads_ends_it_at_once(tmp_path):
    marker = tmp_path / "loading"
    path = make_model(
        tmp_path / "slow", f"import time\nopen({str(marker)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    with server(path) as process:
        wait_for(marker, process)
        process.terminate()
        assert process.wait(TIMEOUT) == 0


def test_a_model_that_does_not_load_ends_the_start_with_its_reason(tmp_path):
    with server(
        make_model(tmp_path / "good", HANDLER), make_model(tmp_path / "bad", "import not_there\n")
    ) as process:
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1
        assert "LoadFailed" in errors
        assert "not_there" in errors.splitlines()[-1]


def test_a_port_in_use_and_a_missing_token_are_reported_before_anything_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with server(metrics_address=f"http://127.0.0.1:{port}") as process:
            assert f"Port {port} on 127.0.0.1 is in use" in process.communicate(timeout=TIMEOUT)[1]
            assert process.returncode == 1
    with server(management_address="http://0.0.0.0:0") as process:
        assert "management_token" in process.communicate(timeout=TIMEOUT)[1]
        assert process.returncode == 1


def test_load_models_needs_a_model_store():
    with server(load_models=["all"]) as process:
        assert "model_store is not" in process.communicate(timeout=TIMEOUT)[1]
