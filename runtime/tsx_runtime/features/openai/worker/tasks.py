"""Embeddings, reranking and transcriptions: APIs of OpenAI, Cohere and Jina for tasks.

https://platform.openai.com/docs/api-reference/embeddings, /audio;
https://docs.cohere.com/reference/rerank; https://jina.ai/reranker
"""

from __future__ import annotations

import base64
import json
import math
import secrets
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.openai.worker import requests
from tsx_runtime.features.openai.worker.requests import OpenAIRequest
from tsx_runtime.worker.codecs.bodies import JsonObject, RefusedField

EMBEDDINGS_PATH, RERANK_PATHS, TRANSCRIPTIONS_PATH = (
    "v1/embeddings",
    ("v1/rerank", "v2/rerank", "rerank"),
    "v1/audio/transcriptions",
)
MAX_INPUTS = 2048
MAX_DOCUMENTS = 10_000


class TaskBody(OpenAIRequest):
    """The body of a request that is answered by a task."""

    @abstractmethod
    def task(self) -> tuple[Any, JsonObject]:
        """Return the inputs and the parameters of the task."""

    @abstractmethod
    def answer(self, output: Any, tokens: int, model: str) -> bytes:
        """Convert the output of the task to a response.

        Raises:
            RefusedField: The request does not fit the output.
        """

    def task_request(self, model: str) -> TaskRequest:
        """Return the request for the task; `model` is the name of the served model."""
        inputs, parameters = self.task()
        adapter = self.adapter(model)
        return TaskRequest(inputs, parameters | ({"adapter": adapter} if adapter else {}))


def read(path: str, row: Any) -> TaskBody:
    """Read the body in a row of a handler's data.

    Raises:
        RefusedField: The path is unknown, or the body cannot be used.
    """
    kind = _BODIES.get(path)
    if kind is None:
        raise RefusedField(
            f"There is no /{path} for this model; it has one of"
            f" {', '.join(f'/{known_path}' for known_path in _BODIES)}.",
            status=404,
        )
    body = row.get("body", row) if isinstance(row, Mapping) else row
    if kind is TranscriptionRequest:
        if not isinstance(body, Mapping):
            raise RefusedField(
                "The body is no form. Send the audio as multipart/form-data, with the fields 'file'"
                " and 'model'.",
                "file",
            )
        body = {
            name: (
                value.decode(errors="replace")
                if name != "file" and isinstance(value, bytes | bytearray)
                else value
            )
            for name, value in body.items()
        }
    return requests.read(kind, body)


def _text_list(value: Any) -> Any:
    """Return a list of texts from one text or several.

    Raises:
        ValueError: A text is empty or not a string.
    """
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text for text in texts)
    ):
        rule = f"it must be a text, or a list of up to {MAX_INPUTS} texts, none of them empty"
        raise ValueError(
            f"{rule}; tokens are not taken (LangChain: check_embedding_ctx_length=False)"
        )
    return texts


class EmbeddingsRequest(TaskBody):
    input: Annotated[list[str], BeforeValidator(_text_list), Field(max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    def task(self) -> tuple[Any, JsonObject]:
        # As in OpenAI's API, vectors have length 1.
        return self.input, {"normalize": True}

    def answer(self, vectors: Sequence[Sequence[float]], tokens: int, model: str) -> bytes:
        size = self.dimensions
        if size is not None:
            if size > len(vectors[0]):
                text = (
                    f"The field 'dimensions' is {size}, but the model's vectors have"
                    f" {len(vectors[0])}. Send no more."
                )
                raise RefusedField(text, "dimensions")
            vectors = [_normalize(vector[:size]) for vector in vectors]
        data = [
            {
                "object": "embedding",
                "index": idx,
                "embedding": _encode_base64(vector)
                if self.encoding_format == "base64"
                else list(vector),
            }
            for idx, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json.dumps({"object": "list", "data": data, "model": model, "usage": usage}).encode()


def _normalize(vector: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]


def _encode_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


Document = Annotated[
    str, BeforeValidator(lambda value: value.get("text") if isinstance(value, dict) else value)
]


class RerankRequest(TaskBody):
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    def task(self) -> tuple[Any, JsonObject]:
        return {"query": self.query, "texts": self.documents}, {}

    def answer(self, output: Sequence[Any], tokens: int, model: str) -> bytes:
        """Return the best documents.

        `output` has a score for each document, or objects with `index` and `score`, as in
        text-embeddings-inference.
        """
        scores = (
            {entry["index"]: entry["score"] for entry in output}
            if isinstance(output[0], dict)
            else dict(enumerate(output))
        )
        best_indexes = sorted(scores, key=lambda idx: -scores[idx])[: self.top_n]
        results = [
            {"index": idx, "relevance_score": scores[idx]}
            | ({"document": {"text": self.documents[idx]}} if self.return_documents else {})
            for idx in best_indexes
        ]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        counts = {"prompt_tokens": tokens, "total_tokens": tokens}
        response = {
            "id": secrets.token_hex(16),
            "object": "list",
            "model": model,
            "results": results,
            "usage": counts,
            "meta": meta,
        }
        return json.dumps(response, ensure_ascii=False).encode()


class TranscriptionRequest(TaskBody, strict=False):
    """A form, whose fields are bytes."""

    file: Annotated[bytes, Field(min_length=1)]
    response_format: Literal["json", "text", "verbose_json"] | None = None
    language: str | None = None
    temperature: Literal["", "0", "0.0"] | None = None
    stream: Literal["", "false"] | None = None

    def task(self) -> tuple[Any, JsonObject]:
        parameters: JsonObject = (
            {"return_timestamps": True} if self.response_format == "verbose_json" else {}
        )
        return self.file, parameters | ({"language": self.language} if self.language else {})

    def answer(self, output: Mapping[str, Any], tokens: int, model: str) -> bytes:
        text = str(output["text"])
        if self.response_format == "text":
            return f"{text}\n".encode()
        if self.response_format != "verbose_json":
            return json.dumps({"text": text}, ensure_ascii=False).encode()
        chunks = output.get("chunks") or [{"text": text, "timestamp": (0.0, None)}]
        segments = [
            {
                "id": idx,
                "start": start or 0.0,
                "end": end if end is not None else start or 0.0,
                "text": chunk["text"],
            }
            for idx, chunk in enumerate(chunks)
            for start, end in [chunk["timestamp"]]
        ]
        response = {
            "task": "transcribe",
            "language": output.get("language", ""),
            "duration": segments[-1]["end"],
            "text": text,
        }
        return json.dumps(response | {"segments": segments}, ensure_ascii=False).encode()


_BODIES: Mapping[str, type[TaskBody]] = {
    EMBEDDINGS_PATH: EmbeddingsRequest,
    **dict.fromkeys(RERANK_PATHS, RerankRequest),
    TRANSCRIPTIONS_PATH: TranscriptionRequest,
}
