"""A real server with two versions of a model, whose traffic the commands change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import Running, serving

HANDLER = """
def handle(data, context):
    return data and [{"label": context.manifest["model"]["modelVersion"], "score": 0.5}] * len(data)
"""


class TwoVersions:
    """A model store with two versions of the model digits, and the addresses of its server."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory, self.store = directory, directory / "store"
        settings = {"TSX_WORKER_PRELOAD": "false", "TSX_LOAD_MODELS": "all"}
        self.environment = environment | settings
        self.client = httpx.Client(base_url=environment["TSX_INFERENCE_ADDRESS"], timeout=60)
        self.management = environment["TSX_MANAGEMENT_ADDRESS"]
        self.store.mkdir()
        for version in ("1.0", "2.0"):
            self.pack(version)

    def pack(self, version: str) -> Path:
        path = self.store / f"digits-{version}.mar"
        return make_model(path, HANDLER, name="digits", version=version)

    def configure(self, traffic: str) -> None:
        """Write the traffic of the model into the configuration."""
        text = f"[models.digits.traffic]\n{traffic}\n"
        (self.directory / "tsx.toml").write_text(text)

    def serving(self) -> AbstractContextManager[Running]:
        arguments = ["serve", "--model-store", self.store]
        return serving(arguments, self.directory, self.environment)

    def ask(self, path: str = "", content: bytes = b"x") -> str:
        """Send a request, and return the version that answered it."""
        response = self.client.post(f"/predictions/digits{path}", content=content)
        return str(response.raise_for_status().json()["label"])


@pytest.fixture
def two_versions(
    tmp_path: Path, user_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[TwoVersions]:
    """Build the model store, and let commands find its server."""
    versions = TwoVersions(tmp_path, user_environment)
    monkeypatch.setenv("TSX_MANAGEMENT_ADDRESS", versions.management)
    with versions.client:
        yield versions
