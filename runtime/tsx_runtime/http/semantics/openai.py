"""The routes of OpenAI's API, and of the rerank APIs beside it: their body names the model."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import NamedTuple

from tsx_runtime.errors import BadRequest
from tsx_runtime.wire import Body, Parts

CHAT, COMPLETIONS, EMBEDDINGS = "v1/chat/completions", "v1/completions", "v1/embeddings"
RESPONSES, TRANSCRIPTIONS, RERANK = "v1/responses", "v1/audio/transcriptions", "v1/rerank"
# By path: the header `url_path` of the request as the worker gets it.
PATHS = {f"/{path}": path.encode() for path in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, TRANSCRIPTIONS, RERANK)}
PATHS |= {"/rerank": RERANK.encode(), "/v2/rerank": b"v2/rerank"}
MODELS = "/v1/models"
PARSED = 64 << 10  # bytes of a body that is parsed to find its model, whatever is in it
FEW_QUOTES = 2000  # in a body that is searched: one with many short strings is parsed sooner
MOST_VALUES = 300_000  # in a large body that is parsed, which holds the event loop for up to 100 ms then
LONGEST_NAME = 1000  # characters


class ModelName(NamedTuple):
    """`NAME[:VERSION][/ADAPTER]`; the version may be a label, and the worker, which has the adapters, reads theirs itself."""

    name: str
    version: str | None
    adapter: str | None


def speaks_openai(path: str) -> bool:
    """Whether errors at this path are in OpenAI's shape. A prediction of KServe's, `/v1/models/MODEL:predict`, is not."""
    if path in PATHS or path == MODELS:
        return True
    return path.startswith(f"{MODELS}/") and not path.endswith((":predict", ":explain"))


def split_name(text: str) -> ModelName:
    model, _, adapter = text.partition("/")
    name, _, version = model.partition(":")
    return ModelName(name, version or None, adapter or None)


def model_in_json(body: Body) -> str | None:
    """The field `model` of a JSON object; None where it has none. Raises BadRequest for what is no such object, as far as it was read."""
    data = b"".join(body.pieces) if isinstance(body, Parts) else bytes(body)
    try:
        if len(data) > PARSED and data.count(b'"') <= FEW_QUOTES:
            return _search(data)
        if len(data) > PARSED and sum(map(data.count, (b",", b"{", b"["))) > MOST_VALUES:
            text = f"The body has more than {MOST_VALUES} values, which are not searched for the field 'model'."
            raise BadRequest(f"{text} Name the model in the path: /predictions/MODEL/VERSION/{CHAT}, and alike.")
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}. Send a JSON object, as OpenAI's API describes it.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body is JSON, but no object. Send a JSON object, as OpenAI's API describes it.")
    return _checked(value.get("model"))


def listed(names: Collection[str], most: int = 20) -> str:
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more, which GET {MODELS} lists" if len(names) > most else "")


def _checked(value: object) -> str | None:
    if value is None or (isinstance(value, str) and len(value) <= LONGEST_NAME):
        return value or None
    what = "a long one" if isinstance(value, str) else f"of the type {type(value).__name__}"
    raise BadRequest(f"The field 'model' must be a short string; it is {what}.")


def _search(data: bytes) -> str | None:
    """Of a large object. Strings are passed over at the speed of a search for their ends, so that an image in one costs next to nothing;
    of two fields of that name the last counts, as for a parser."""
    depth, end, key, found = 0, 0, b"", None
    for start, stop in _strings(data):
        between = data[end:start]
        depth += between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")
        if depth == 1:
            text = data[start:stop]
            if between.strip() != b":":
                key = text
            elif key == b'"model"' or (b"\\" in key and json.loads(key) == "model"):
                found = text
        end = stop
    return None if found is None else _checked(json.loads(found))


def _strings(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each string of a JSON text begins and ends, with its quotes."""
    start = data.find(b'"')
    while start >= 0:
        stop = data.find(b'"', start + 1)
        while stop > 0 and _is_escaped(data, stop):
            stop = data.find(b'"', stop + 1)
        if stop < 0:
            return
        yield start, stop + 1
        start = data.find(b'"', stop + 1)


def _is_escaped(data: bytes, at: int, window: int = 16) -> bool:
    """Whether an odd number of backslashes stands before it."""
    before = data[max(0, at - window) : at]
    count = len(before) - len(before.rstrip(b"\\"))
    return _is_escaped(data, at, window * 16) if count == window else count % 2 == 1
