"""What a client of the management API sees of a model's own packages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.wheels import make_wheel

HANDLER = """
import os, sys
import own_words

def handle(data, context):
    return data and [f"{own_words.VERSION} {sys.prefix == os.environ['VIRTUAL_ENV']} {os.environ.get('SECRET_OF_THE_SERVER')}"] * len(data)
"""


def needy(directory: Path, requirements: str) -> None:
    make_model(directory, HANDLER, config="useVenv: true\n")
    manifest = directory / "MAR-INF" / "MANIFEST.json"
    reported = json.loads(manifest.read_text())
    reported["model"]["requirementsFile"] = "requirements.txt"
    manifest.write_text(json.dumps(reported))
    (directory / "requirements.txt").write_text(requirements)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "42")


def test_models_with_packages_of_their_own_over_rest(
    no_index: None,
    start_server: Callable[..., Any],
    tmp_path: Path,
    error_of: Callable[..., tuple[str, str]],
) -> None:
    needy(tmp_path / "good", "own-words\n")
    make_wheel(tmp_path / "good", "own_words", "1.5")
    needy(tmp_path / "bad", "no-such-package\n")
    needy(tmp_path / "evil", "own-words; $(touch /tmp/x)\n")
    settings = {
        "model_store": tmp_path,
        "cache_dir": tmp_path / "cache",
        "install_py_dep_per_model": True,
    }
    with start_server(**settings, blacklist_env_vars="SECRET_.*") as server:
        management, inference = server.clients["management"], server.clients["inference"]
        assert (
            management.post("/models", params={"url": "good", "initial_workers": 1}).status_code
            == 200
        )
        assert inference.post("/predictions/good").text == "1.5 True None"
        assert management.get("/models/good").json()[0]["useVenv"] is True
        refused = management.post("/models", params={"url": "bad"})
        assert refused.status_code == 400
        kind, text = error_of(refused)
        assert kind == "ModelException"
        assert text.startswith("Custom pip package installation failed for model bad\n")
        assert "No matching distribution found for no-such-package" in text
        kind, text = error_of(management.post("/models", params={"url": "evil"}))
        assert (kind, text.splitlines()[0]) == (
            "ModelException",
            "Custom pip package installation failed for model evil",
        )
        assert [model["modelName"] for model in management.get("/models").json()["models"]] == [
            "good"
        ]
        assert management.delete("/models/good").status_code == 200


def test_a_group_is_described_by_its_processes_and_refused_where_it_cannot_be(
    empty: Any, store: Path, error_of: Callable[..., tuple[str, str]]
) -> None:
    make_model(
        store / "pair.mar", HANDLER, config="parallelType: tp\ntorchrun:\n  nproc-per-node: 2\n"
    )
    make_model(store / "nodes.mar", HANDLER, config="torchrun:\n  nnodes: 2\n")
    assert empty.management.post("/models", params={"url": "pair.mar"}).status_code == 200
    [reported] = empty.management.get("/models/pair").json()
    assert (reported["parallelType"], reported["parallelLevel"]) == ("tp", 2)
    refused = empty.management.post("/models", params={"url": "nodes.mar"})
    assert refused.status_code == 400
    assert "asks for 2 nodes: set rdzv-endpoint" in error_of(refused)[1]
