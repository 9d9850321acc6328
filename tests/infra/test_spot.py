"""The watcher of a spot instance, which stops tsx's containers at the interruption notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "spot" / "tsx-spot-drain"

pytestmark = [
    pytest.mark.usefixtures("processes"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]


class Metadata(BaseHTTPRequestHandler):
    """A double of EC2's metadata, with a notice from the third poll on; it requires a token."""

    polls = 0

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "60"
        self.answer(200 if self.path == "/latest/api/token" else 404, b"a-token")

    def do_GET(self) -> None:
        assert self.path == "/latest/meta-data/spot/instance-action"
        type(self).polls += 1
        is_authorized = self.headers["X-aws-ec2-metadata-token"] == "a-token"
        self.answer(
            401 if not is_authorized else 200 if type(self).polls >= 3 else 404,
            b'{"action": "terminate"}',
        )

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[str]:
    Metadata.polls = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_containers_are_stopped_after_the_notice(metadata: str, tmp_path: Path) -> None:
    docker = f'echo "$@" >> {tmp_path}/calls; [ "$1" != ps ] || printf "one\\ntwo\\n"'
    for name, text in {"docker": docker, "sleep": f"echo $1 >> {tmp_path}/naps"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"METADATA": metadata, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(
        [SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "naps").read_text().split() == ["5", "5"]
    assert (tmp_path / "calls").read_text().splitlines() == [
        "ps --quiet --filter label=tsx.target=container",
        "stop one two",
    ]
