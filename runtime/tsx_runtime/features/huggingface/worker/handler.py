"""The handler `huggingface` for directories that `save_pretrained` has written.

It answers requests of Hugging Face's inference API in batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from tsx_archiver.metadata.huggingface import HANDLER, family
from tsx_runtime.features.generation.worker import spans
from tsx_runtime.features.generation.worker.interface import TaskResult
from tsx_runtime.features.generation.worker.pretrained import find_pretrained
from tsx_runtime.features.huggingface.worker.answers import QuestionAnswering
from tsx_runtime.features.huggingface.worker.classification import (
    FillMask,
    TextClassification,
    TokenClassification,
    ZeroShotClassification,
)
from tsx_runtime.features.huggingface.worker.loading import Loaded, load
from tsx_runtime.features.huggingface.worker.pipelines import (
    IMAGE_TASKS,
    ImageTask,
    ImageTextToText,
    SoundTask,
    SpeechRecognition,
)
from tsx_runtime.features.huggingface.worker.requests import read_body
from tsx_runtime.features.huggingface.worker.sentences import Sentences, TextRanking
from tsx_runtime.features.huggingface.worker.seq2seq import OUTPUT_NAMES, TextToText
from tsx_runtime.features.huggingface.worker.tasks import Request, Task
from tsx_runtime.features.openai.worker import tasks as openai
from tsx_runtime.worker.codecs.json_text import JsonText, to_compact_json
from tsx_runtime.worker.exceptions import InvalidInput, LoadError, describe_error, map_rows
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import choose_device

TASKS: Mapping[str, Callable[[Loaded], Task]] = {
    "audio-classification": SoundTask,
    "automatic-speech-recognition": SpeechRecognition,
    "feature-extraction": Sentences,
    "fill-mask": FillMask,
    "image-text-to-text": ImageTextToText,
    "question-answering": QuestionAnswering,
    "sentence-similarity": Sentences,
    "text-classification": TextClassification,
    "text-ranking": TextRanking,
    "token-classification": TokenClassification,
    "zero-shot-classification": ZeroShotClassification,
    **dict.fromkeys(IMAGE_TASKS, ImageTask),
    **dict.fromkeys(OUTPUT_NAMES, TextToText),
}
# The task for each path of OpenAI's and other APIs.
OPENAI_TASKS = {
    openai.EMBEDDINGS_PATH: "feature-extraction",
    **dict.fromkeys(openai.RERANK_PATHS, "text-ranking"),
    openai.TRANSCRIPTIONS_PATH: "automatic-speech-recognition",
}
WARM_UP_REQUESTS = 3  # The first requests of a process are slow, since they initialize torch.
_REQUEST_KEY = "\0read"  # the key under which `cost` stores the parsed request in a row

logger = logging.getLogger("tsx.worker")


class HuggingFaceHandler:
    """A handler for Hugging Face models, for all tasks except the generation of text."""

    takes_raw_bodies = True

    def __init__(self) -> None:
        self.device: Any = None
        self.task: Task
        self.loaded: Loaded
        self.input_kind = "json"
        self.precision: str | None = None

    def initialize(self, context: Context) -> None:
        """Load the model, and warm it up.

        Raises:
            LoadError: The model cannot be loaded, or cannot answer a request.
        """
        self.device = choose_device(context.system_properties.get("gpu_id"))
        files = find_pretrained(context, self.device)
        if family(files.task) not in TASKS:
            task_names = ", ".join(sorted(TASKS))
            raise LoadError(
                f"huggingface.task is {files.task!r}; the handler {HANDLER} has {task_names}. Name"
                " it with --task when packing."
            )
        task_class = TASKS[family(files.task)]
        self.loaded = load(files)
        self.precision = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(
            self.loaded.model.dtype
        )
        if task_class is TextRanking and type(self.loaded.model).__name__.endswith("Model"):
            task_class = Sentences
        self.task = task_class(self.loaded)
        self.input_kind = self.task.input_kind
        self._warm_up()

    def _warm_up(self) -> None:
        """Answer the task's example request several times.

        Raises:
            LoadError: The model fails.
        """
        durations = []
        try:
            for _ in range(WARM_UP_REQUESTS):
                start = time.perf_counter()
                with torch.inference_mode():
                    self.task.answer([self.task.read(self.task.example())])
                durations.append(time.perf_counter() - start)
        except Exception as error:  # the boundary to the code of a model
            raise LoadError(
                f"The model is loaded, but cannot answer a request of {self.loaded.task}:"
                f" {describe_error(error)}"
            ) from error
        logger.info(
            "warm: the first request took %.1f ms, the last %.1f ms",
            durations[0] * 1000,
            durations[-1] * 1000,
        )

    def handle(self, data: Any, context: Context) -> list[Any]:
        """Return the response to each request.

        Raises:
            BadRows: Some requests cannot be used.
        """
        if context.get_request_header(0, "describe") == "True":
            return [self._describe()]
        # the bodies of requests for OpenAI's paths, by position
        bodies: dict[int, openai.TaskBody] = {}

        def read(position: int, row: Any) -> Request:
            path = str(context.get_request_header(position, "url_path") or "").strip("/")
            if path not in OPENAI_TASKS and not path.startswith("v1/"):
                return self._read_request(row)
            if OPENAI_TASKS.get(path) != self.loaded.task:
                raise InvalidInput(
                    f"Model {context.model_name} is of the task {self.loaded.task}, which does not"
                    f" answer /{path}. "
                    f'Send {{"inputs": ...}} to /predictions/{context.model_name}.'
                )
            bodies[position] = openai.read(path, row)
            return self.task.read(bodies[position].task_request(context.model_name))

        def write(position: int, result: TaskResult) -> Any:
            if position not in bodies:
                return JsonText(to_compact_json(result.output, context.json_nan))
            context.set_response_content_type(position, "application/json")
            body, model = bodies[position], bodies[position].model or context.model_name
            if isinstance(body, openai.EmbeddingsRequest):
                usage = {"request.model": model, "usage.input_tokens": result.tokens}
                spans.report(context, position, {"operation.name": "embeddings", **usage})
            return body.answer(result.output, result.tokens, model)

        requests = map_rows(read, data)
        with torch.inference_mode():
            results = self.task.answer(requests)
        return map_rows(write, results)

    def cost(self, row: Any) -> float:
        """Return the cost of a row in tokens, or in inputs if the task reads no text."""
        try:
            request: Request | None = self._read_request(row)
            # The request is not stored for other rows, which may be forms for OpenAI's paths.
            if isinstance(row, dict) and ("body" in row or "data" in row):
                row[_REQUEST_KEY] = request
        except InvalidInput:
            request = self._read_openai_request(row)
        return 0.0 if request is None else float(self.task.cost(request))

    def _read_openai_request(self, row: Any) -> Request | None:
        """Read a row in one of OpenAI's formats; return None if it is in none of them.

        The path is unknown here, but these formats differ from Hugging Face's.
        """
        for path in (openai.EMBEDDINGS_PATH, openai.RERANK_PATHS[0]):
            with suppress(InvalidInput):
                return self.task.read(openai.read(path, row).task_request(""))
        return None

    def _read_request(self, row: Any) -> Request:
        request: Request | None = row.get(_REQUEST_KEY) if isinstance(row, Mapping) else None
        return (
            request
            if request is not None
            else self.task.read(read_body(row, self.task.fields, media=self.task.media))
        )

    def _describe(self) -> dict[str, Any]:
        return {
            "task": self.loaded.task,
            "architecture": type(self.loaded.model).__name__,
            "parameters": sorted(self.task.parameters),
            "adapters": list(self.loaded.adapters),
        }
