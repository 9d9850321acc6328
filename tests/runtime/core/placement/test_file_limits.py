"""A server that may have no more files and connections open."""

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


def predict(running):
    return httpx.post(running.address("predictions") + "/predictions/one", timeout=DEADLINE)


def is_serving(running):
    with contextlib.suppress(httpx.TransportError):
        return predict(running).status_code == 200
    return False


def test_a_server_raises_its_own_limit_and_leaves_that_of_its_workers(tmp_path, user_environment):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = min(soft, 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    try:
        with serve_model(tmp_path, user_environment) as running:
            allowed = psutil.Process(running.process.pid).rlimit(psutil.RLIMIT_NOFILE)
            assert allowed == (hard, hard)
            assert predict(running).json() == [before, hard]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_survives_more_connections_than_it_may_have(tmp_path, user_environment):
    with serve_model(tmp_path, user_environment) as running, contextlib.ExitStack() as stack:
        seen = psutil.Process(running.process.pid)
        seen.rlimit(psutil.RLIMIT_NOFILE, (FILES, FILES))
        parts = urlsplit(running.address("predictions"))
        held = [
            stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
            for _ in range(2 * FILES)
        ]
        until(lambda: seen.num_fds() >= FILES)
        before = sum(seen.cpu_times()[:2])
        held[0].settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            held[0].recv(1)
        # The server waits, and does not use up a core.
        assert sum(seen.cpu_times()[:2]) - before < 0.5
        # Further connections are closed at once.
        assert not is_serving(running)
        assert running.process.poll() is None
        for connection in held:
            connection.close()
        until(lambda: is_serving(running))
        assert running.process.poll() is None
