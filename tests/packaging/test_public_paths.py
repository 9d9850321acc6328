"""Modules that users name in their own code, images and scripts are importable under the names that
the docs give.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = {  # module: (what is used of it, the file that names it to users)
    "tsx_runtime.targets.entry": (
        ["main"],
        "docs/guides/deploy/lambda.md",
    ),  # the entry point of built images
    "tsx_runtime.targets.health": (
        ["main"],
        "docs/guides/deploy/container.md",
    ),  # their health check
    "tsx_runtime.worker.exceptions": (
        ["BadRows", "ClientsGone", "InvalidInput", "PredictionException"],
        "docs/guides/handlers.md",
    ),  # raised or caught in handlers
    "tsx_runtime.worker.handlers.staging": (
        ["to_device"],
        "docs/guides/handlers.md",
    ),  # called by handlers
    "tsx_runtime.recordings": (
        ["read"],
        "docs/guides/recording.md",
    ),  # reads recorded requests in users' scripts
    "tsx_runtime.grpc.protos": (
        [],
        "docs/guides/grpc.md",
    ),  # the folder of the .proto files that clients are generated from
    "tsx_runtime.plugins": (
        ["Endpoint", "Refused", "Sample", "Waiting"],
        "docs/guides/plugins.md",
    ),  # the interface of plugins
}


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_keeps_its_name_and_is_documented(module: str) -> None:
    names, document = PUBLIC[module]
    imported = importlib.import_module(module)
    assert [name for name in names if not hasattr(imported, name)] == []
    assert module in (ROOT / document).read_text(encoding="utf-8")
