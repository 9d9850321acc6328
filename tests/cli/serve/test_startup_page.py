"""The page that a server prints at its start, and servers whose output is not read."""

from __future__ import annotations

import http.client
import os
import re
import signal
import sys
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.support import forked
from tests.support.models import make_model
from tests.support.servers import screen
from tsx_cli.serve.startup_page import kind, progress_line, request_line
from tsx_runtime.api.management.samples import SampleInput
from tsx_runtime.server.startup import LoadStatus
from tsx_runtime.settings.schema import Settings

TIMEOUT = 60.0

NOISY = """
import logging, sys

print("y" * 200_000)  # while it loads

def handle(data, context):
    if data is None:
        return None
    for _ in range(50):
        print("x" * 999)
        print("x" * 999, file=sys.stderr)
        logging.getLogger("noisy").error("x" * 999)
    return ["OK"] * len(data)
"""


@contextmanager
def serving(tmp_path, environment, redirection="", **streams):
    """Start a server whose model prints much, and wait until it is ready."""
    make_model(tmp_path / "noisy", NOISY)
    command = f"exec {sys.executable} -m tsx_cli serve noisy {redirection}"
    process = forked.Popen(["sh", "-c", command], cwd=tmp_path, env=environment, **streams)
    address = environment["TSX_INFERENCE_ADDRESS"].removeprefix("http://")
    try:
        end = time.monotonic() + TIMEOUT
        while not is_ready(address):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        yield process, address
    finally:
        process.kill()
        process.wait()


def is_ready(address):
    try:
        return call(address, "GET", "/readyz") == 200
    except OSError:
        return False


def call(address, method, path):
    """Send a request and return the status of its response."""
    with closing(http.client.HTTPConnection(address, timeout=TIMEOUT)) as connection:
        connection.request(method, path)
        response = connection.getresponse()
        response.read()
        return response.status


@pytest.mark.nightly
def test_unread_output_blocks_neither_workers_nor_the_server(tmp_path, user_environment):
    reader, writer = os.pipe()
    with serving(tmp_path, user_environment, stdout=writer, stderr=writer) as (process, address):
        for _ in range(3):
            assert call(address, "POST", "/predictions/noisy") == 200
            assert call(address, "GET", "/livez") == 200
        # The server logs this change of the number of workers.
        management = user_environment["TSX_MANAGEMENT_ADDRESS"].removeprefix("http://")
        assert call(management, "PUT", "/models/noisy?min_worker=2&synchronous=true") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
    os.close(reader)
    os.close(writer)


@pytest.mark.nightly
@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_a_full_disk_or_closed_streams_cause_no_failures(tmp_path, user_environment, redirection):
    with serving(tmp_path, user_environment, redirection) as (process, address):
        for _ in range(3):
            assert call(address, "POST", "/predictions/noisy") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0


STEERING = r"""
import ctypes, os, sys

def handle(data, context):
    return data

print("\x1bc\x1b]8;;http://evil.org\x07from Python")
sys.stdout.flush()
os.system(r"printf '\033]52;c;ZXZpbA==\007\033cfrom a program\n'")
os.write(2, b"\x1b]0;title\x07from a descriptor\n")
ctypes.CDLL(None).dprintf(1, b"%s", b"\x1bcfrom native code\n")
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere only what Python prints is made harmless"
)
def test_control_characters_that_a_model_prints_are_escaped(tmp_path, user_environment):
    make_model(tmp_path / "evil", STEERING)
    output, code = screen(["serve", "evil"], tmp_path, user_environment, until="Ctrl-C")
    assert code == 0
    for source in ("Python", "a program", "a descriptor", "native code"):
        assert re.search(rf"evil 1\.0 \| (\\x[0-9a-f]{{2}}\S*)+from {source}", output), output
    assert "\x1b]" not in output
    assert "\x1bc" not in output


SLOW = """
import time

time.sleep(1.3)

def handle(data, context):
    return data
"""


@pytest.mark.slow
def test_a_long_load_shows_bytes_and_seconds(tmp_path, user_environment):
    make_model(tmp_path / "slow", SLOW)
    output, code = screen(["serve", "slow"], tmp_path, user_environment, until="Ctrl-C")
    assert code == 0
    assert re.search(r"loading slow: worker \d+ has [\d.]+ MB in memory, \d+ s", output), output
    assert output.index("loading slow ...") < output.index(" serves 1 model")


def test_the_progress_of_a_start_is_shown_in_bytes():
    status = LoadStatus(
        12.4,
        [("big.mar", "unpacking", 3_200_000_000, 14_000_000_000)],
        [("other", "9001", 512_000_000)],
    )
    assert progress_line("big.mar, other.mar", status) == (
        "loading big.mar: unpacking 3.2 GB of 14.0 GB; other: worker 9001 has 512 MB in memory, 12 s"
    )
    starting = LoadStatus(0.6, [], [("code", "9000", 0), ("code", "9001", 2_000_000)])
    assert (
        progress_line("code", starting)
        == "loading code: worker 9000 is starting; code: worker 9001 has 2.0 MB in memory, 1 s"
    )
    assert progress_line("big.mar", LoadStatus(0.6, [], [])) == "loading big.mar, 1 s"


CURL = "curl http://h:1/predictions/net -H 'Content-Type: text/plain'"


def test_a_short_text_is_part_of_the_curl_command():
    for body in (b'{"inputs": "good"}', b'{"inputs": "good"}\n'):
        line = request_line(
            "http://h:1", "net", SampleInput("samples/example", "text/plain", body), Settings()
        )
        assert line == f"""{CURL} -d '{{"inputs": "good"}}'"""


@pytest.mark.parametrize(
    "body", [b"\x89PNG\r\n\x1a\n", b"@file", b"two\nlines", b"x" * 300, b"\x1b[2J"]
)
def test_the_curl_command_downloads_any_other_sample(body):
    line = request_line(
        "http://h:1", "net", SampleInput("samples/example", "text/plain", body), Settings()
    )
    assert line == f"curl http://h:1/v2/models/net/sample -s | {CURL} --data-binary @-"


def test_the_page_names_the_served_form(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "w.pth")
    archive = SimpleNamespace(manifest=SimpleNamespace(serialized_file="w.pth"), directory=tmp_path)
    for forms, text in (({}, "weights"), ({"onnx": 2}, "weights, as onnx")):
        assert kind(SimpleNamespace(archive=archive, forms=forms)) == text
