"""The routes of OpenAI's API, and of the rerank APIs beside it: their body names the model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tsx_runtime.errors import BadRequest
from tsx_runtime.wire import Body, Parts

CHAT, COMPLETIONS, EMBEDDINGS = "v1/chat/completions", "v1/completions", "v1/embeddings"
RESPONSES, TRANSCRIPTIONS, RERANK = "v1/responses", "v1/audio/transcriptions", "v1/rerank"
# By path: the header `url_path` of the request as the worker gets it.
PATHS = {
    f"/{path}": path.encode()
    for path in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, TRANSCRIPTIONS, RERANK)
}
PATHS |= {"/rerank": RERANK.encode(), "/v2/rerank": b"v2/rerank"}
MODELS = "/v1/models"
SMALL = 64 << 10  # bytes of a body that is read whatever is in it
MOST_VALUES = 1_000_000  # in a large body, which holds the event loop for up to 100 ms then
LONGEST_NAME = 1000  # characters


class ModelName(NamedTuple):
    """`NAME[:VERSION][/ADAPTER]`; the version may be a label, and the worker, which has the
    adapters, reads theirs itself.
    """

    name: str
    version: str | None
    adapter: str | None


class _Named(BaseModel):
    model_config = ConfigDict(strict=True)

    model: Annotated[str, Field(max_length=LONGEST_NAME)] | None = None


def speaks_openai(path: str) -> bool:
    """Whether errors at this path are in OpenAI's shape.

    A prediction of KServe's, `/v1/models/MODEL:predict`, is not.
    """
    return path in PATHS or (
        path.startswith("/v1/") and not path.endswith((":predict", ":explain"))
    )


def split_name(text: str) -> ModelName:
    model, _, adapter = text.partition("/")
    name, _, version = model.partition(":")
    return ModelName(name, version or None, adapter or None)


def model_in_json(body: Body) -> str | None:
    """The field `model` of a JSON object; None where it has none. Raises BadRequest for what is no
    such object.

    Of 6 MB, an image takes 0.4 ms, and long texts 40 ms: values are checked, but no objects of
    Python are made of them.
    """
    data = b"".join(body.pieces) if isinstance(body, Parts) else bytes(body)
    if len(data) > SMALL and sum(map(data.count, (b",", b"{", b"["))) > MOST_VALUES:
        text = (
            f"The body has more than {MOST_VALUES} values, which are not searched for the field"
            " 'model'."
        )
        raise BadRequest(
            f"{text} Name the model in the path: /predictions/MODEL/VERSION/{CHAT}, and alike."
        )
    try:
        return _Named.model_validate_json(data).model or None
    except ValidationError as error:
        (fault,) = error.errors(include_url=False)
        if fault["loc"]:
            raise BadRequest(f"The field 'model' must be a short string: {fault['msg']}.") from None
        raise BadRequest(
            f"The body is not a JSON object: {fault['msg']}. Send one, as OpenAI's API"
            " describes it."
        ) from None


def listed(names: Collection[str], most: int = 20) -> str:
    shown = sorted(names)[:most]
    return ", ".join(shown) + (
        f" and {len(names) - most} more, which GET {MODELS} lists" if len(names) > most else ""
    )
