"""The routes of OpenAI's API and of rerank APIs, whose body names the model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tsx_runtime.errors import BadRequest
from tsx_runtime.wire import Body, Parts

CHAT, COMPLETIONS, EMBEDDINGS = "v1/chat/completions", "v1/completions", "v1/embeddings"
RESPONSES, TRANSCRIPTIONS, RERANK = "v1/responses", "v1/audio/transcriptions", "v1/rerank"
# values of the header `url_path` for the worker, by path
PATHS = {
    f"/{path}": path.encode()
    for path in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, TRANSCRIPTIONS, RERANK)
}
PATHS |= {"/rerank": RERANK.encode(), "/v2/rerank": b"v2/rerank"}
MODELS = "/v1/models"
UNCHECKED_BYTES = 64 << 10  # smaller bodies are parsed without counting their values
MAX_VALUES = 1_000_000  # values of a body; as many take up to 100 ms of the event loop
MAX_NAME_CHARS = 1000


class ModelName(NamedTuple):
    """The parts of `NAME[:VERSION][/ADAPTER]`; the version may be a label.

    Only the worker knows its adapters, so it reads the adapter's name itself.
    """

    name: str
    version: str | None
    adapter: str | None


class _NamedModel(BaseModel):
    model_config = ConfigDict(strict=True)

    model: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


def speaks_openai(path: str) -> bool:
    """Tell whether errors at a path have OpenAI's format.

    KServe's predictions at `/v1/models/MODEL:predict` are excluded.
    """
    return path in PATHS or (
        path.startswith("/v1/") and not path.endswith((":predict", ":explain"))
    )


def split_name(text: str) -> ModelName:
    model, _, adapter = text.partition("/")
    name, _, version = model.partition(":")
    return ModelName(name, version or None, adapter or None)


def model_in_json(body: Body) -> str | None:
    """Return the field `model` of a JSON object, or None.

    The JSON is validated without creating Python objects. This takes 0.4 ms for an image of 6 MB,
    and 40 ms for long texts.

    Raises:
        BadRequest: The body is not a JSON object, or its `model` is not a short string.
    """
    data = b"".join(body.pieces) if isinstance(body, Parts) else bytes(body)
    if len(data) > UNCHECKED_BYTES and sum(map(data.count, (b",", b"{", b"["))) > MAX_VALUES:
        text = (
            f"The body has more than {MAX_VALUES} values, which are not searched for the field"
            " 'model'."
        )
        raise BadRequest(
            f"{text} Name the model in the path: /predictions/MODEL/VERSION/{CHAT}, and alike."
        )
    try:
        return _NamedModel.model_validate_json(data).model or None
    except ValidationError as error:
        (problem,) = error.errors(include_url=False)
        if problem["loc"]:
            raise BadRequest(
                f"The field 'model' must be a short string: {problem['msg']}."
            ) from None
        raise BadRequest(
            f"The body is not a JSON object: {problem['msg']}. Send one, as OpenAI's API"
            " describes it."
        ) from None


def name_list(names: Collection[str], limit: int = 20) -> str:
    """Return a text with at most `limit` names, and the number of the other names."""
    names_shown = sorted(names)[:limit]
    return ", ".join(names_shown) + (
        f" and {len(names) - limit} more, which GET {MODELS} lists" if len(names) > limit else ""
    )
