"""The handler `huggingface` with tiny models, called like in a worker."""

from __future__ import annotations

import base64
import io
import json
import os
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.support import huggingface_models
from tests.support.huggingface_models import WORDS
from tests.support.served_model import a_context, a_served_model, answers_of
from tsx_runtime.features.huggingface.worker.handler import HuggingFaceHandler
from tsx_runtime.worker.execution.batch import ServedModel
from tsx_runtime.worker.handler_api.metrics import Metrics

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
    task: str

    def ask(self, *bodies: Any, **headers: str) -> list[Answer]:
        """Send one batch, and return its answers. A body that is not bytes is sent as JSON."""
        block = [(name.encode(), value.encode()) for name, value in headers.items()]
        raw_bodies = (
            body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies
        )
        answers = answers_of(self.model, *map(bytearray, raw_bodies), headers=block)
        return [Answer(status, json.loads(body)) for status, _, body in answers]

    def values(self, *bodies: Any) -> list[Any]:
        """Return the values of a batch whose answers are all successful."""
        answers = self.ask(*bodies)
        assert [answer.status for answer in answers] == [200] * len(bodies), answers
        return [answer.value for answer in answers]

    def values_alone(self, *bodies: Any) -> list[Any]:
        """Return the values of requests in separate batches."""
        return [self.values(body)[0] for body in bodies]

    def pipeline(self) -> Any:
        """Load the pipeline of transformers from the same directory."""
        import transformers

        return transformers.pipeline(self.task, model=str(self.directory), device="cpu")


Serve = Callable[[str], Served]
TASKS = {
    "bert-classification": "text-classification",
    "roberta-classification": "text-classification",
    "bert-tokens": "token-classification",
    "bert-masked": "fill-mask",
    "bert-nli": "zero-shot-classification",
    "bert": "feature-extraction",
    "bert-answers": "question-answering",
    "t5": "summarization",
    "bert-ranking": "text-ranking",
    "sentences": "feature-extraction",
    "vit": "image-classification",
    "segformer": "image-segmentation",
    "detr": "object-detection",
    "glpn": "depth-estimation",
    "clip": "zero-shot-image-classification",
    "wav2vec2-classification": "audio-classification",
    "wav2vec2-speech": "automatic-speech-recognition",
    "whisper": "automatic-speech-recognition",
    "llava": "image-text-to-text",
}


def mixed_texts(count: int, seed: int = 0, max_words: int = 14) -> list[str]:
    """Return texts of very different lengths."""
    chance = random.Random(seed)
    return [
        " ".join(chance.choices(WORDS, k=chance.choice([1, 1, 2, 4, max_words])))
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


def start(
    directory: Path,
    task: str,
    model_dir: Path,
    config: Mapping[str, Any] = {},
    adapters: tuple[str, ...] = (),
) -> Served:
    (model_dir / "huggingface_model").symlink_to(directory)
    manifest = {"model": {}, "huggingface": {"task": task, "adapters": list(adapters)}}
    context = a_context(manifest=manifest, metrics=Metrics("m"), model_yaml_config=dict(config))
    context.system_properties["model_dir"] = str(model_dir)
    handler = HuggingFaceHandler()
    handler.initialize(context)
    served = a_served_model(
        handler.handle, handler, context=context, decode=False, max_response_size=1 << 28
    )
    return Served(handler, directory, served, task)


def assert_refused_alone(model: Served, body: Any, message: str) -> None:
    """Assert that a bad request gets 400 and the others in its batch are answered."""
    example = model.handler.task.example()
    good_request = {"inputs": example.inputs, "parameters": example.parameters}
    first, bad_answer, last = model.ask(good_request, body, good_request)
    assert (first.status, bad_answer.status, last.status) == (200, 400, 200)
    assert message in bad_answer.message


@pytest.fixture(scope="session")
def served(model_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return a function that takes "kind" or "kind/task" and returns the loaded model.

    Each model is loaded once per session.
    """

    @cache
    def get(name: str) -> Served:
        kind, _, task = name.partition("/")
        directory = huggingface_models.model(kind, model_root)
        return start(directory, task or TASKS[kind], tmp_path_factory.mktemp("hf"))

    return get


PNG = base64.b64encode(b"\x89PNG\r\n").decode()[:7]


def pixels(png: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))), dtype=int)


def assert_near(expected: Any, actual: Any, tolerance: float = 1e-4) -> None:
    """Assert that two values of JSON are the same, with a tolerance for numbers."""
    if isinstance(expected, dict):
        assert expected.keys() == dict(actual).keys(), (expected, actual)
        for key in expected:
            assert_near(expected[key], actual[key], tolerance)
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), (expected, actual)
        for expected_entry, actual_entry in zip(expected, actual, strict=True):
            assert_near(expected_entry, actual_entry, tolerance)
    elif isinstance(expected, str) and expected.startswith(PNG):
        # A value between two levels may be rounded to either one.
        assert np.abs(pixels(expected) - pixels(actual)).max() <= 1
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=tolerance, abs=tolerance)
    else:
        assert expected == actual, (expected, actual)
