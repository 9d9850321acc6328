"""Helpers for unit tests of handlers without a server.

They equal TorchServe's `ts.torch_handler.unit_tests.test_utils`.
"""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_runtime.wire import request_meta
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.metrics import Metrics

READ_TIMEOUT_S = 60


class MockContext(Context):
    """A context for tests, with one request that has no headers.

    Attributes:
        explain: Whether the request asks for an explanation.

    Examples:
        >>> context = MockContext(model_name="digits", gpu_id=None)
        >>> context.system_properties["gpu_id"] is None
        True
        >>> context.get_request_id(0)
        'mock'
    """

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = ".",
        model_file: str | None = "model.py",
        gpu_id: str | int | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        """Create a context for a model, whose files need not exist.

        Args:
            model_pt_file: The name of the serialized file, or None.
            model_dir: The directory of the model.
            model_file: The name of the model file, or None.
            gpu_id: The number of the GPU, which is ignored if torch finds no GPU.
            model_name: The name of the model.
            model_yaml_config_file: The name of a configuration file in `model_dir`, which is read.
        """
        model: dict[str, Any] = {"modelName": model_name}
        if model_pt_file:
            model["serializedFile"] = model_pt_file
        if model_file:
            model["modelFile"] = model_file
        config: dict[str, Any] = {}
        if model_yaml_config_file:
            config = yaml.safe_load((Path(model_dir) / model_yaml_config_file).read_text()) or {}
        gpu = int(gpu_id) if gpu_id is not None and _has_gpu() else None
        super().__init__(
            model_name,
            str(model_dir),
            {"model": model},
            1,
            gpu,
            "0.12.0",
            True,
            Metrics(model_name),
            config,
        )
        self.explain = False
        self.begin([request_meta("mock", b"", []).decode("latin-1")])

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of the request; the header `explain` depends on the attribute."""
        if key == "explain":
            return "True" if self.explain else None
        return super().get_request_header(idx, key)


def _has_gpu() -> bool:
    import torch  # A context itself needs no torch.

    return torch.cuda.is_available()


def copy_files(src_dir: str | Path, dst_dir: str | Path, files: Mapping[str, str]) -> None:
    """Copy files from one directory to another.

    Args:
        src_dir: The source directory.
        dst_dir: The target directory.
        files: A mapping of names in `src_dir` to names in `dst_dir`.
    """
    for source, target in files.items():
        shutil.copy(Path(src_dir) / source, Path(dst_dir) / target)


def download_model(model_url: str, model_dir: str | Path) -> None:
    """Download a file to `model.pt` in `model_dir`, replacing an older one.

    Raises:
        ValueError: `model_url` is not an http or https URL.
        OSError: The download failed.
    """
    if urlsplit(model_url).scheme not in ("http", "https"):
        raise ValueError(f"{model_url!r} is no http or https address")
    target = Path(model_dir) / "model.pt"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        urllib.request.urlopen(model_url, timeout=READ_TIMEOUT_S) as response,
        write_atomically(target, durable=False) as file,
    ):
        shutil.copyfileobj(response, file)
