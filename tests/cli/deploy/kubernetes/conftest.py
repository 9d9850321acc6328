"""`tsx deploy --target kubernetes` over a double of kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.support.models import make_model
from tests.support.platforms.kubectl import Cluster
from tsx_cli.deploy.kubernetes import kinds
from tsx_cli.main import main

HANDLER = "def handle(data, context):\n    return data and ['{}'] * len(data)\n"
SCHEMAS = Path(__file__).parent / "schemas"  # of kinds that are no part of Kubernetes
IMAGE = "registry.example.com/digits:1"


def check(manifest: dict[str, Any]) -> None:
    """Raises where its schema does not take it."""
    schema = SCHEMAS / f"{manifest['kind']}.json"
    if schema.is_file():
        jsonschema.validate(manifest, json.loads(schema.read_text()))
    else:
        kubernetes_validate.validate(manifest, "1.33", strict=True)


class Deploy:
    """The command, with what all calls say."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        make_model(directory / "digits.mar", HANDLER)

    def __call__(self, *words: str, code: int = 0) -> str:
        assert main(["deploy", *words, "--name", "digits", "--target", "kubernetes"]) == code, (
            self.capsys.readouterr()
        )
        out, self.err = self.capsys.readouterr()
        return out

    def apply(self, *words: str, code: int = 0) -> str:
        return self(
            "apply", "digits.mar", "--no-check", "--yes", "--image", IMAGE, *words, code=code
        )

    def plan(self, *words: str, code: int) -> dict[str, str]:
        reported = json.loads(
            self("plan", "digits.mar", "--no-check", "--json", "--image", IMAGE, *words, code=code)
        )
        return {change["id"]: change["action"] for change in reported["changes"]}


@pytest.fixture
def deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Deploy:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kinds.KubernetesObject, "poll", 0.0)
    monkeypatch.setattr(kinds.Revision, "poll", 0.0)
    (tmp_path / "kubectl").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return Deploy(tmp_path, capsys)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)
