"""A server with an unknown uvicorn version: the ASGI lane serves all requests."""

from __future__ import annotations

import os

import pytest

from tests.support.clients.rawhttp import RawConnection, request
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, serving

HANDLER = """
def handle(data, context):
    return None if data is None else [bytes(row["body"]) for row in data]
"""
UNKNOWN_UVICORN = """
import uvicorn.protocols.http.httptools_impl as theirs

class HttpToolsProtocol(theirs.HttpToolsProtocol):
    def __init__(self, config, server_state, app_state, _loop=None, novelty=None):
        super().__init__(config, server_state, app_state, _loop)

theirs.HttpToolsProtocol = HttpToolsProtocol
"""


@pytest.mark.usefixtures("processes")
def test_an_unknown_uvicorn_gives_one_warning_and_disables_the_fast_lane(tmp_path):
    make_model(tmp_path / "echo", HANDLER)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "sitecustomize.py").write_text(UNKNOWN_UVICORN)
    paths = [str(tmp_path / "newer"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"TSX_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    with serving(
        ["serve", "echo", *FREE_PORTS, "--set=worker_preload=false"], tmp_path, environment
    ) as server:
        host, _, port = server.address("predictions").removeprefix("http://").partition(":")
        with RawConnection((host, int(port))) as connection:
            connection.send(
                request(
                    target=b"/predictions/echo",
                    headers=[(b"Expect", b"100-continue")],
                    body=b"at once",
                )
            )
            answers = [connection.answer(), connection.answer()]
        assert server.stop() == 0
        assert "Traceback" not in server.log
        warnings = [line for line in server.log.splitlines() if "fast lane" in line]
    # uvicorn's protocol sends 100 Continue although the body has already arrived.
    assert [answer and answer.status for answer in answers] == [100, 200]
    assert answers[1] is not None
    assert answers[1].body == b"at once"
    assert len(warnings) == 1
    assert "HttpToolsProtocol(config, server_state, app_state, _loop)" in warnings[0]
