"""Modules that users import keep their names and are documented."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The used names of each module, and the page that names it.
PUBLIC = {
    # The entry point and the health check of built images.
    "tsx_runtime.targets.entry": (["main"], "docs/guides/deploy/lambda.md"),
    "tsx_runtime.targets.health": (["main"], "docs/guides/deploy/container.md"),
    # Errors and functions of handlers.
    "tsx_runtime.worker.exceptions": (
        ["BadRows", "ClientsGone", "InvalidInput", "PredictionException"],
        "docs/guides/handlers.md",
    ),
    "tsx_runtime.worker.handlers.staging": (["to_device"], "docs/guides/handlers.md"),
    # A reader of recorded requests for users' scripts.
    "tsx_runtime.recordings": (["read"], "docs/guides/recording.md"),
    # The folder of the .proto files of clients.
    "tsx_runtime.grpc.protos": ([], "docs/guides/grpc.md"),
    # The interface of plugins.
    "tsx_runtime.plugins": (
        ["Endpoint", "Refused", "Sample", "Waiting"],
        "docs/guides/plugins.md",
    ),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_keeps_its_name_and_is_documented(module: str) -> None:
    names, document = PUBLIC[module]
    imported = importlib.import_module(module)
    assert [name for name in names if not hasattr(imported, name)] == []
    assert module in (ROOT / document).read_text(encoding="utf-8")
