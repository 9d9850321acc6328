"""The server at its limit of open files and connections."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import time
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.models import make_model
from tests.support.servers import DEADLINE, FREE_PORTS, serving

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sets the limits of another process"
)

HANDLER = """
import json, resource

def handle(data, context):
    return None if data is None else [json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)) for _ in data]
"""
FILES = 64


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def serve_model(directory, environment):
    return serving(
        ["serve", make_model(directory / "one", HANDLER), *FREE_PORTS], directory, environment
    )


def predict(server_process):
    return httpx.post(server_process.address("predictions") + "/predictions/one", timeout=DEADLINE)


def is_serving(server_process):
    with contextlib.suppress(httpx.TransportError):
        return predict(server_process).status_code == 200
    return False


def test_the_server_raises_its_file_limit_but_not_its_workers(tmp_path, user_environment):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = min(soft, 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard))
    try:
        with serve_model(tmp_path, user_environment) as server_process:
            allowed = psutil.Process(server_process.process.pid).rlimit(psutil.RLIMIT_NOFILE)
            assert allowed == (hard, hard)
            assert predict(server_process).json() == [soft_limit, hard]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_server_survives_more_connections_than_descriptors(tmp_path, user_environment):
    with serve_model(tmp_path, user_environment) as server_process, contextlib.ExitStack() as stack:
        process = psutil.Process(server_process.process.pid)
        process.rlimit(psutil.RLIMIT_NOFILE, (FILES, FILES))
        url_parts = urlsplit(server_process.address("predictions"))
        held_connections = [
            stack.enter_context(socket.create_connection((url_parts.hostname, url_parts.port)))
            for _ in range(2 * FILES)
        ]
        until(lambda: process.num_fds() >= FILES)
        cpu_seconds = sum(process.cpu_times()[:2])
        held_connections[0].settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            held_connections[0].recv(1)
        # The server waits without using CPU time.
        assert sum(process.cpu_times()[:2]) - cpu_seconds < 0.5
        # Further connections are closed at once.
        assert not is_serving(server_process)
        assert server_process.process.poll() is None
        for connection in held_connections:
            connection.close()
        until(lambda: is_serving(server_process))
        assert server_process.process.poll() is None
