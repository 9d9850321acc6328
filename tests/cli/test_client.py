"""`tsx client generate`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.models import make_model
from tsx_cli.main import main
from tsx_runtime.testing import serve

HANDLER = "def handle(data, context):\n    return None if data is None else ['x'] * len(data)\n"


@pytest.mark.usefixtures("processes")
def test_a_servers_models_become_python_stubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_INFERENCE_TOKEN", "secret")
    archive = make_model(tmp_path / "talker.mar", HANDLER)
    with serve(archive, worker_preload=False, inference_token="secret") as server:
        assert main(["client", "generate", server.url, "-o", str(tmp_path / "stubs.py")]) == 0
    text = (tmp_path / "stubs.py").read_text()
    assert "talker: TalkerModel" in text
    assert "talker: AsyncTalkerModel" in text


@pytest.mark.slow
def test_an_unreachable_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "generate", "http://127.0.0.1:9"]) == 1
    assert "are not known: No server answers" in capsys.readouterr().err


def test_the_error_without_tsx_client_names_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tsx_client", None)
    assert main(["client", "generate"]) == 2
    assert "pip install tsx-client" in capsys.readouterr().err
