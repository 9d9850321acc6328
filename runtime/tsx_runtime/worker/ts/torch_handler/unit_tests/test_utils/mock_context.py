"""`ts.torch_handler.unit_tests.test_utils.mock_context`: a context for unit tests of a handler, outside of a server."""

from pathlib import Path
from typing import Any

import yaml

from tsx_runtime.wire import request_meta
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.metrics import Metrics

__all__ = ["MockContext"]


class MockContext(Context):
    """Holds one request without headers. With `explain` set, that request asks for an explanation."""

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
        super().__init__(model_name, str(model_dir), {"model": model}, 1, gpu, "0.12.0", True, Metrics(model_name), config)
        self.explain = False
        self.begin([request_meta("mock", b"", []).decode("latin-1")])

    def get_request_header(self, idx: int, key: str) -> Any:
        if key == "explain":
            return "True" if self.explain else None
        return super().get_request_header(idx, key)


def _has_gpu() -> bool:
    import torch  # here: the context itself needs no torch

    return torch.cuda.is_available()
