"""A server that may have no more files and connections open."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
import time
from urllib.parse import urlsplit

import psutil
import pytest

from tests.runtime.targets.server.test_server import TIMEOUT, call, ready, server
from tests.support.models import make_model

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
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def predict(address):
    try:
        return call(address, "POST", "/predictions/one")[0]
    except OSError:
        return None


@pytest.mark.usefixtures("processes")
def test_it_allows_itself_what_the_system_allows_and_leaves_its_workers_as_they_were(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = min(soft, 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    try:
        with server(make_model(tmp_path / "one", HANDLER)) as process:
            started = ready(process)
            assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
            assert json.loads(call(started["inference"], "POST", "/predictions/one")[1]) == [
                before,
                hard,
            ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("processes")
def test_more_connections_than_it_may_have_cost_it_nothing_but_those_connections(tmp_path):
    with server(make_model(tmp_path / "one", HANDLER)) as process, contextlib.ExitStack() as stack:
        started = ready(process)
        seen = psutil.Process(process.pid)
        seen.rlimit(psutil.RLIMIT_NOFILE, (FILES, FILES))
        parts = urlsplit(started["inference"])
        held = [
            stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
            for _ in range(2 * FILES)
        ]
        until(lambda: seen.num_fds() >= FILES)
        before = sum(seen.cpu_times()[:2])
        held[0].settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            held[0].recv(1)
        assert sum(seen.cpu_times()[:2]) - before < 0.5  # it does not turn round and round
        assert predict(started["inference"]) is None  # let go at once, not left to wait
        assert process.poll() is None
        for connection in held:
            connection.close()
        until(lambda: predict(started["inference"]) == 200)
        assert process.poll() is None
