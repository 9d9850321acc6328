"""Embeddings, rerank and transcriptions between the shapes of OpenAI's, Cohere's and Jina's APIs and what a task reads and gives.

https://platform.openai.com/docs/api-reference/embeddings, /audio; https://docs.cohere.com/reference/rerank; https://jina.ai/reranker
"""

from __future__ import annotations

import base64
import json
import math
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tsx_runtime.worker.generation.interface import TaskRequest, TaskResult
from tsx_runtime.worker.openai.errors import RefusedField
from tsx_runtime.worker.openai.fields import Fields, read_document

EMBEDDINGS, RERANK, TRANSCRIPTIONS = "v1/embeddings", ("v1/rerank", "v2/rerank", "rerank"), "v1/audio/transcriptions"
PATHS = (EMBEDDINGS, *RERANK, TRANSCRIPTIONS)
MOST_INPUTS = 2048
MOST_DOCUMENTS = 10_000


class _Embeddings(NamedTuple):
    inputs: list[str]
    encoding: str
    dimensions: int | None


class _Rerank(NamedTuple):
    query: str
    documents: list[str]
    top_n: int
    returns: bool


class _Transcription(NamedTuple):
    audio: bytes
    parameters: dict[str, Any]
    format: str


def read(path: str, headers: Mapping[str, str], body: Any) -> TaskRequest:
    """`body`: that of a row, as bytes or parsed; of a form, the row itself. `headers`: of the request. Raises InvalidInput."""
    fields = _fields(path, body)
    is_resolved = headers.get("x-tsx-protocol") == "openai"  # the server has found this model by the name in the body
    adapter = (fields.model or "").partition("/")[2] if is_resolved else ""
    chosen = {"adapter": adapter} if adapter else {}
    asked = _read(path, fields)
    if isinstance(asked, _Embeddings):
        return TaskRequest(asked.inputs, chosen)
    if isinstance(asked, _Rerank):
        return TaskRequest({"query": asked.query, "texts": asked.documents}, chosen)
    return TaskRequest(asked.audio, asked.parameters | chosen)


def write(path: str, body: Any, results: Sequence[TaskResult], model: str) -> bytes:
    """The answer to that request. Raises InvalidInput."""
    fields = _fields(path, body)
    asked, name = _read(path, fields), fields.model or model
    tokens = sum(result.tokens for result in results)
    output = results[0].output
    if isinstance(asked, _Embeddings):
        return json.dumps(_embeddings(asked, output, tokens, name)).encode()
    if isinstance(asked, _Rerank):
        return json.dumps(_ranked(asked, output, tokens, name), ensure_ascii=False).encode()
    return _transcript(asked.format, output)


def _fields(path: str, body: Any) -> Fields:
    if path != TRANSCRIPTIONS:
        return Fields(read_document(body))
    if not isinstance(body, Mapping) or "file" not in body:
        raise RefusedField(
            "The form has no field 'file'. Send the audio as multipart/form-data, with the fields 'file' and 'model'.", "file"
        )
    return Fields({name: _form_value(name, value) for name, value in body.items()})


def _form_value(name: str, value: Any) -> Any:
    if name == "file" or not isinstance(value, bytes | bytearray):
        return value
    return value.decode(errors="replace")


def _read(path: str, fields: Fields) -> _Embeddings | _Rerank | _Transcription:
    if path == EMBEDDINGS:
        return _read_embeddings(fields)
    if path in RERANK:
        return _read_rerank(fields)
    if path == TRANSCRIPTIONS:
        return _read_transcription(fields)
    raise RefusedField(f"There is no /{path} for this model; it has one of {', '.join(f'/{each}' for each in PATHS)}.", status=404)


def _read_embeddings(fields: Fields) -> _Embeddings:
    given = fields.take("input")
    inputs = [given] if isinstance(given, str) else given
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_INPUTS or not all(isinstance(each, str) and each for each in inputs):
        must = f"a text, or a list of up to {MOST_INPUTS} texts; tokens are not taken (LangChain: check_embedding_ctx_length=False)"
        raise fields.wrong("input", given, must)
    asked = _Embeddings(inputs, fields.choice("encoding_format", "float", "base64"), fields.whole("dimensions", 1, 1 << 20))
    fields.finish()
    return asked


def _embeddings(asked: _Embeddings, vectors: Sequence[Sequence[float]], tokens: int, model: str) -> dict[str, Any]:
    size = asked.dimensions
    if size is not None:
        if size > len(vectors[0]):
            raise RefusedField(
                f"The field 'dimensions' is {size}, but the model's vectors have {len(vectors[0])}. Send no more.", "dimensions"
            )
        vectors = [_unit(vector[:size]) for vector in vectors]
    data = [
        {"object": "embedding", "index": idx, "embedding": _packed(vector) if asked.encoding == "base64" else list(vector)}
        for idx, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _unit(vector: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in vector)) or 1.0
    return [value / length for value in vector]


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _read_rerank(fields: Fields) -> _Rerank:
    query, given = fields.text("query"), fields.take("documents")
    if not query:
        raise fields.missing("query", '"What is a panda?"')
    texts = [each.get("text") if isinstance(each, dict) else each for each in given] if isinstance(given, list) else []
    if not 0 < len(texts) <= MOST_DOCUMENTS or not all(isinstance(each, str) for each in texts):
        raise fields.wrong("documents", given, f"a list of up to {MOST_DOCUMENTS} texts")
    top_n = fields.whole("top_n", 1, 1 << 31) or len(texts)
    asked = _Rerank(query, list(map(str, texts)), min(top_n, len(texts)), fields.flag("return_documents"))
    fields.finish()
    return asked


def _ranked(asked: _Rerank, output: Sequence[Any], tokens: int, model: str) -> dict[str, Any]:
    """`output`: scores, or what text-embeddings-inference answers: index and score of each text."""
    scores = dict(enumerate(output)) if not isinstance(output[0], dict) else {e["index"]: e["score"] for e in output}
    best = sorted(scores, key=lambda idx: -scores[idx])[: asked.top_n]
    results = [
        {"index": idx, "relevance_score": scores[idx]} | ({"document": {"text": asked.documents[idx]}} if asked.returns else {})
        for idx in best
    ]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": secrets.token_hex(16), "object": "list", "model": model, "results": results, "usage": counts, "meta": meta}


def _read_transcription(fields: Fields) -> _Transcription:
    audio = fields.take("file")
    if isinstance(audio, str):
        audio = audio.encode()
    if not audio:
        raise fields.missing("file", "the bytes of a sound file")
    format = fields.choice("response_format", "json", "text", "verbose_json")
    if fields.text("temperature") not in (None, "", "0", "0.0"):
        raise RefusedField("The field 'temperature' is not supported here. Send the request without it.", "temperature")
    if fields.text("stream") not in (None, "false"):
        raise RefusedField("The field 'stream' is not supported here: the text comes whole.", "stream")
    parameters: dict[str, Any] = {"return_timestamps": True} if format == "verbose_json" else {}
    if language := fields.text("language"):
        parameters["language"] = language
    fields.finish()
    return _Transcription(bytes(audio), parameters, format)


def _transcript(format: str, output: Mapping[str, Any]) -> bytes:
    text = str(output["text"])
    if format == "text":
        return f"{text}\n".encode()
    if format == "json":
        return json.dumps({"text": text}, ensure_ascii=False).encode()
    chunks = output.get("chunks") or [{"text": text, "timestamp": (0.0, None)}]
    segments = [
        {"id": idx, "start": start or 0.0, "end": end if end is not None else start or 0.0, "text": chunk["text"]}
        for idx, chunk in enumerate(chunks)
        for start, end in [chunk["timestamp"]]
    ]
    shown = {"task": "transcribe", "language": output.get("language", ""), "duration": segments[-1]["end"], "text": text}
    return json.dumps(shown | {"segments": segments}, ensure_ascii=False).encode()
