"""The bodies of requests in the format of Hugging Face's inference API.

A body is {"inputs": ..., "parameters": {...}}, or the bytes of an image or a sound. Some tasks have
fields of their own in place of `inputs`, such as `question` and `context`. Parameters may also be
fields of the body itself, as in text-embeddings-inference.
https://huggingface.co/docs/inference-providers/tasks
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from tsx_runtime.worker.codecs.bodies import describe_requirement, quote_value
from tsx_runtime.worker.codecs.json_text import read_json
from tsx_runtime.worker.exceptions import InvalidInput, form_advice, quote_field_names
from tsx_runtime.worker.generation.interface import TaskRequest

Reader: TypeAlias = TypeAdapter[Any]

JSON_STARTS = b'{["'  # No format of images or sounds begins with them.
# `options` is for the cache and the queue of the hosted API.
NO_PARAMETERS = frozenset({"inputs", "parameters", "options", "model"})
# Three names for the same object in the history of the API.
NESTED = ("generation_parameters", "generate_parameters", "generate_kwargs")
MAX_LABELS = 1000
MAX_TEMPLATE_CHARS = 1000


def read_body(row: Any, fields: Collection[str], *, media: bool) -> TaskRequest:
    """Return the request in a row of a handler's data.

    Args:
        row: The row.
        fields: The fields of the task in place of `inputs`.
        media: Whether a body that is no JSON is a file. If not, it is a text.

    Raises:
        InvalidInput: The body cannot be used.
    """
    if not isinstance(row, Mapping):
        return read_document(row, fields)
    body = row.get("body", row.get("data"))
    if body is None:
        in_bytes = all(isinstance(value, bytes | bytearray) for value in row.values())
        # A row without bytes is the instance of an envelope.
        return _of_form(row, fields) if in_bytes else read_document(row, fields)
    if isinstance(body, bytes | bytearray | memoryview):
        return _of_bytes(bytes(body), fields, media)
    return read_document(body, fields)


def _of_bytes(body: bytes, fields: Collection[str], media: bool) -> TaskRequest:
    start = body.lstrip()[:1]
    if not start:
        raise InvalidInput('The request has an empty body. Send JSON such as {"inputs": ...}.')
    if start not in JSON_STARTS:
        if media:
            return TaskRequest(body, {})
        try:
            return TaskRequest(body.decode(), {})
        except UnicodeDecodeError:
            raise InvalidInput(
                'The body is neither JSON nor text in UTF-8. Send JSON such as {"inputs": "..."}.'
            ) from None
    try:
        document = read_json(body)
    except ValueError as error:
        raise InvalidInput(
            f'The body begins as JSON does, but cannot be read as JSON: {error}. Send {{"inputs":'
            " ...}."
        ) from None
    return read_document(document, fields)


def _of_form(row: Mapping[str, Any], fields: Collection[str]) -> TaskRequest:
    """Read a form: a file as `inputs`, `file`, `image` or `audio`, and `parameters` as JSON."""
    file = next((row[name] for name in ("inputs", "file", "image", "audio") if name in row), None)
    if file is None:
        raise InvalidInput(
            f"The form has no field `inputs`, but {quote_field_names(row)}.{form_advice(row)}"
        )
    content = row.get("parameters", b"{}")
    try:
        parameters = read_json(bytes(content))
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"The field `parameters` of the form is not JSON: {error}.") from None
    return read_document({"inputs": bytes(file), "parameters": parameters}, fields)


def read_document(document: Any, fields: Collection[str]) -> TaskRequest:
    """Return the request in a JSON value.

    Raises:
        InvalidInput: There is no input, or `parameters` is no object.
    """
    if not isinstance(document, Mapping):
        return TaskRequest(document, {})
    inputs = document.get("inputs")
    if inputs is None:
        inputs = {name: document[name] for name in fields if name in document} or None
    if inputs is None:
        wanted = f" or {', '.join(sorted(fields))}" if fields else ""
        raise InvalidInput(
            f"The request has no `inputs`{wanted}, but"
            f' {", ".join(map(repr, document)) or "nothing"}. Send {{"inputs": ...}}.'
        )
    parameters = document.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidInput(f"`parameters` is a {_kind(parameters)}; it must be an object.")
    top_level = {
        name: value
        for name, value in document.items()
        if name not in NO_PARAMETERS and name not in fields
    }
    return TaskRequest(
        inputs,
        {
            name: value
            for name, value in {**top_level, **(parameters or {})}.items()
            if value is not None
        },
    )


def read_parameters(
    parameters: Mapping[str, Any], known: Mapping[str, Reader], task: str
) -> dict[str, Any]:
    """Return the validated parameters of a task.

    Raises:
        InvalidInput: The task has no such parameter, or a value is invalid.
    """
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in NESTED and "max_new_tokens" in known:
            if not isinstance(value, Mapping):
                raise InvalidInput(
                    f"The parameter {name!r} is a {_kind(value)}; it must be an object."
                )
            inner = {
                key: item for key, item in value.items() if item is not None and key not in NESTED
            }
            values |= read_parameters(inner, known, task)
            continue
        if name not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise InvalidInput(f"{task} has no parameter {name!r}; {takes}.")
        try:
            values[name] = known[name].validate_python(value)
        except ValidationError as error:
            raise InvalidInput(
                f"The parameter {name!r} is {quote_value(value)}:"
                f" {describe_requirement(error.errors(include_url=False)[0])}."
            ) from None
    return values


def _kind(value: Any) -> str:
    return {dict: "object", list: "list", str: "string", bool: "boolean"}.get(type(value), "number")


# Readers of parameters


def integer(least: int = 1, most: int = 1 << 31) -> Reader:
    return TypeAdapter(Annotated[int, Field(strict=True, ge=least, le=most)])


def number(least: float, most: float) -> Reader:
    return TypeAdapter(Annotated[float, Field(strict=True, ge=least, le=most)])


def one_of(*choices: Any) -> Reader:
    return TypeAdapter(Literal[choices])  # type: ignore[arg-type]  # The type is made at run time.


def _listed(value: Any) -> Any:
    """Split a string at its commas, like transformers."""
    return (
        [label.strip() for label in value.split(",") if label.strip()]
        if isinstance(value, str)
        else value
    )


def _template(value: str) -> str:
    """Refuse all of Python's format language but `{}`: a width would fill the memory.

    Raises:
        ValueError: The template has other braces, or no `{}`.
    """
    if value.count("{}") != 1 or set(value.replace("{}", "")) & set("{}"):
        raise ValueError("it must have {} in the place of the label, and no other braces")
    return value


_String = Annotated[str, Field(min_length=1)]
flag: Reader = TypeAdapter(Annotated[bool, Field(strict=True)])
string: Reader = TypeAdapter(_String)
strings: Reader = TypeAdapter(list[str])
labels: Reader = TypeAdapter(
    Annotated[list[_String], Field(min_length=1, max_length=MAX_LABELS), BeforeValidator(_listed)]
)
# A template is repeated for each label.
template: Reader = TypeAdapter(
    Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS), AfterValidator(_template)]
)
# For single texts, the two names mean the same as True.
truncation: Reader = TypeAdapter(
    Annotated[
        Literal[True, False, "do_not_truncate", "longest_first", "only_first"],
        AfterValidator(lambda value: value not in (False, "do_not_truncate")),
    ]
)
FUNCTION: Mapping[str, Reader] = {
    "function_to_apply": one_of("sigmoid", "softmax", "none"),
    "top_k": integer(),
}


def generation(most: int) -> dict[str, Reader]:
    """Return the parameters of transformers' `generate`, for at most `most` tokens."""
    return {
        "do_sample": flag,
        "early_stopping": one_of(True, False, "never"),
        "epsilon_cutoff": number(0, 1),
        "eta_cutoff": number(0, 1),
        "length_penalty": number(-10, 10),
        "max_length": integer(1, most),
        "max_new_tokens": integer(1, most),
        "min_length": integer(0, most),
        "min_new_tokens": integer(0, most),
        "no_repeat_ngram_size": integer(0, 100),
        "num_beams": integer(1, 16),
        "num_return_sequences": integer(1, 16),
        "repetition_penalty": number(0.01, 100),
        "temperature": number(0.01, 100),
        "top_k": integer(0),
        "top_p": number(0.0001, 1),
        "typical_p": number(0.0001, 1),
        "use_cache": flag,
    }
