"""Helpers for unit tests of handlers, without a server: a context and its files.

TorchServe's `ts.torch_handler.unit_tests.test_utils`.
"""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tsx_archiver.storage.atomic_file import whole_file
from tsx_runtime.wire import request_meta
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.metrics import Metrics

TIMEOUT = 60  # seconds without a byte


class MockContext(Context):
    """Holds one request without headers. With `explain` set, that request asks for an
    explanation.
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
        if key == "explain":
            return "True" if self.explain else None
        return super().get_request_header(idx, key)


def _has_gpu() -> bool:
    import torch  # here: the context itself needs no torch

    return torch.cuda.is_available()


def copy_files(src_dir: str | Path, dst_dir: str | Path, files: Mapping[str, str]) -> None:
    """`files` has the name in `dst_dir` for each name in `src_dir`."""
    for source, target in files.items():
        shutil.copy(Path(src_dir) / source, Path(dst_dir) / target)


def download_model(model_url: str, model_dir: str | Path) -> None:
    """Store the file behind an http or https address as `model.pt` in `model_dir`, in the place of
    an older one.
    """
    if urlsplit(model_url).scheme not in ("http", "https"):
        raise ValueError(f"{model_url!r} is no http or https address")
    target = Path(model_dir) / "model.pt"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        urllib.request.urlopen(model_url, timeout=TIMEOUT) as answer,
        whole_file(target, durable=False) as file,
    ):
        shutil.copyfileobj(answer, file)
