"""Modules that users import keep their names and are documented."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The names that users import from each module, and the page that documents them.
PUBLIC = {
    # Built images use the entry point and the health check.
    "tsx_runtime.targets.entry": (["main"], "docs/guides/deploy/lambda.md"),
    "tsx_runtime.targets.health": (["main"], "docs/guides/deploy/container.md"),
    # Handlers use these errors and functions.
    "tsx_runtime.worker.exceptions": (
        ["BadRows", "ClientsGone", "InvalidInput", "PredictionException"],
        "docs/guides/handlers.md",
    ),
    "tsx_runtime.worker.handlers.staging": (["to_device"], "docs/guides/handlers.md"),
    # Users' scripts read recorded requests with it.
    "tsx_runtime.recordings": (["read"], "docs/guides/recording.md"),
    # Clients copy the .proto files of this folder.
    "tsx_runtime.grpc.protos": ([], "docs/guides/grpc.md"),
    # Plugins implement this interface.
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
