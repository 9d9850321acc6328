"""The handler `huggingface` with tiny models, called as a worker calls it; transformers' own
pipelines beside it.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.support import huggingface_models
from tsx_runtime.wire import request_meta
from tsx_runtime.worker.execution.batch import ServedModel, answer_batch
from tsx_runtime.worker.execution.recovery import Ceiling
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import Coroutines, LoadedHandler
from tsx_runtime.worker.handler_api.metrics import Metrics
from tsx_runtime.worker.handlers.huggingface.handler import HuggingFaceHandler

pytest.importorskip("transformers")


class Answer(NamedTuple):
    status: int
    value: Any

    @property
    def message(self) -> str:
        return str(self.value["message"])


class Served(NamedTuple):
    handler: HuggingFaceHandler
    directory: Path
    model: ServedModel

    def ask(self, *bodies: Any, **headers: str) -> list[Answer]:
        """One batch; a body that is no bytes is sent as JSON."""
        block = [(name.encode(), value.encode()) for name, value in headers.items()]
        items = [
            (
                0,
                request_meta(f"r{number}", b"", block),
                bytearray(body if isinstance(body, bytes) else json.dumps(body).encode()),
            )
            for number, body in enumerate(bodies)
        ]
        outcome = answer_batch(self.model, items, lambda *_: None)
        return [Answer(status, json.loads(bytes(body))) for status, _, body in outcome.answers]

    def ok(self, *bodies: Any) -> list[Any]:
        answers = self.ask(*bodies)
        assert [answer.status for answer in answers] == [200] * len(bodies), answers
        return [answer.value for answer in answers]

    def alone(self, *bodies: Any) -> list[Any]:
        return [self.ok(body)[0] for body in bodies]

    def pipeline(self, task: str) -> Any:
        """Another of transformers' own, of the same directory."""
        import transformers

        return transformers.pipeline(task, model=str(self.directory), device="cpu")


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.getbasetemp()
    return own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own


def start(
    directory: Path,
    task: str,
    place: Path,
    config: Mapping[str, Any] = {},
    adapters: tuple[str, ...] = (),
) -> Served:
    (place / "huggingface_model").symlink_to(directory)
    manifest = {"model": {}, "huggingface": {"task": task, "adapters": list(adapters)}}
    context = Context(
        "m", str(place), manifest, 32, None, "0.12.0", True, Metrics("m"), dict(config)
    )
    handler = HuggingFaceHandler()
    handler.initialize(context)
    served = ServedModel(
        LoadedHandler(handler.handle, "huggingface", handler),
        context,
        Coroutines(),
        False,
        1 << 28,
        Ceiling(),
        Metrics("m"),
        cost=None,
    )
    return Served(handler, directory, served)


@pytest.fixture(scope="session")
def served(model_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """`served(kind, task)`: once in a session."""
    found: dict[tuple[str, str], Served] = {}

    def get(kind: str, task: str) -> Served:
        if (kind, task) not in found:
            found[kind, task] = start(
                huggingface_models.model(kind, model_root), task, tmp_path_factory.mktemp("hf")
            )
        return found[kind, task]

    return get


PNG = base64.b64encode(b"\x89PNG\r\n").decode()[:7]


def pixels(png: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))), dtype=int)


def near(one: Any, other: Any, tolerance: float = 1e-4) -> None:
    """The same JSON, numbers up to a tolerance."""
    if isinstance(one, dict):
        assert one.keys() == dict(other).keys(), (one, other)
        for key in one:
            near(one[key], other[key], tolerance)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), (one, other)
        for each, its in zip(one, other, strict=True):
            near(each, its, tolerance)
    elif isinstance(one, str) and one.startswith(PNG):
        assert (
            np.abs(pixels(one) - pixels(other)).max() <= 1
        )  # what is between two levels may become either
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=tolerance, abs=tolerance)
    else:
        assert one == other, (one, other)
