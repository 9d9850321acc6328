"""Reading of request bodies in the format of Hugging Face's inference API.

A body is {"inputs": ..., "parameters": {...}}, or the bytes of an image or a sound. Some tasks have
other fields in place of `inputs`, such as `question` and `context`. Parameters may also be
top-level fields of the body, as in text-embeddings-inference.
https://huggingface.co/docs/inference-providers/tasks
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.worker.codecs.bodies import describe_requirement, quote_value
from tsx_runtime.worker.codecs.json_text import read_json
from tsx_runtime.worker.exceptions import InvalidInput, form_advice, quote_field_names

Reader: TypeAlias = TypeAdapter[Any]

JSON_FIRST_BYTES = b'{["'  # No image or sound format begins with one of these bytes.
# Top-level fields that are not parameters. `options` is only for the hosted API.
NON_PARAMETER_FIELDS = frozenset({"inputs", "parameters", "options", "model"})
# Names that the API has used for an object of generation parameters.
NESTED_PARAMETER_OBJECTS = ("generation_parameters", "generate_parameters", "generate_kwargs")
MAX_LABELS = 1000
MAX_TEMPLATE_CHARS = 1000


def read_body(row: Any, fields: Collection[str], *, media: bool) -> TaskRequest:
    """Read the request in a row of a handler's data.

    Args:
        row: The row.
        fields: The fields that the task has in place of `inputs`.
        media: Whether a body that is not JSON is a file. If not, it is a text.

    Raises:
        InvalidInput: The body cannot be used.
    """
    if not isinstance(row, Mapping):
        return read_document(row, fields)
    body = row.get("body", row.get("data"))
    if body is None:
        is_form = all(isinstance(value, bytes | bytearray) for value in row.values())
        # If it is not a form, the row is an instance of an envelope.
        return _read_form(row, fields) if is_form else read_document(row, fields)
    if isinstance(body, bytes | bytearray | memoryview):
        return _read_bytes(bytes(body), fields, media)
    return read_document(body, fields)


def _read_bytes(body: bytes, fields: Collection[str], media: bool) -> TaskRequest:
    first_byte = body.lstrip()[:1]
    if not first_byte:
        raise InvalidInput('The request has an empty body. Send JSON such as {"inputs": ...}.')
    if first_byte not in JSON_FIRST_BYTES:
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


def _read_form(row: Mapping[str, Any], fields: Collection[str]) -> TaskRequest:
    """Read a form with a file (`inputs`, `file`, `image` or `audio`) and `parameters` as JSON."""
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
    """Read the request in a JSON value.

    Raises:
        InvalidInput: The inputs are missing, or `parameters` is not an object.
    """
    if not isinstance(document, Mapping):
        return TaskRequest(document, {})
    inputs = document.get("inputs")
    if inputs is None:
        inputs = {name: document[name] for name in fields if name in document} or None
    if inputs is None:
        other_fields = f" or {', '.join(sorted(fields))}" if fields else ""
        raise InvalidInput(
            f"The request has no `inputs`{other_fields}, but"
            f' {", ".join(map(repr, document)) or "nothing"}. Send {{"inputs": ...}}.'
        )
    parameters = document.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidInput(f"`parameters` is a {_json_type(parameters)}; it must be an object.")
    top_level = {
        name: value
        for name, value in document.items()
        if name not in NON_PARAMETER_FIELDS and name not in fields
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
    parameters: Mapping[str, Any], readers: Mapping[str, Reader], task: str
) -> dict[str, Any]:
    """Validate the parameters of a request for a task.

    Raises:
        InvalidInput: The task has no such parameter, or a value is invalid.
    """
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in NESTED_PARAMETER_OBJECTS and "max_new_tokens" in readers:
            if not isinstance(value, Mapping):
                raise InvalidInput(
                    f"The parameter {name!r} is a {_json_type(value)}; it must be an object."
                )
            nested_parameters = {
                key: item
                for key, item in value.items()
                if item is not None and key not in NESTED_PARAMETER_OBJECTS
            }
            values |= read_parameters(nested_parameters, readers, task)
            continue
        if name not in readers:
            accepted = f"it takes {', '.join(sorted(readers))}" if readers else "it takes none"
            raise InvalidInput(f"{task} has no parameter {name!r}; {accepted}.")
        try:
            values[name] = readers[name].validate_python(value)
        except ValidationError as error:
            raise InvalidInput(
                f"The parameter {name!r} is {quote_value(value)}:"
                f" {describe_requirement(error.errors(include_url=False)[0])}."
            ) from None
    return values


def _json_type(value: Any) -> str:
    return {dict: "object", list: "list", str: "string", bool: "boolean"}.get(type(value), "number")


# Readers of parameters


def integer(minimum: int = 1, maximum: int = 1 << 31) -> Reader:
    return TypeAdapter(Annotated[int, Field(strict=True, ge=minimum, le=maximum)])


def number(minimum: float, maximum: float) -> Reader:
    return TypeAdapter(Annotated[float, Field(strict=True, ge=minimum, le=maximum)])


def one_of(*choices: Any) -> Reader:
    return TypeAdapter(Literal[choices])  # type: ignore[arg-type]  # The type is created at run time.


def _split_labels(value: Any) -> Any:
    """Split a string at its commas, as transformers does."""
    return (
        [label.strip() for label in value.split(",") if label.strip()]
        if isinstance(value, str)
        else value
    )


def _check_template(value: str) -> str:
    """Check that a template has only the format `{}`, since a large width would fill the memory.

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
    Annotated[
        list[_String], Field(min_length=1, max_length=MAX_LABELS), BeforeValidator(_split_labels)
    ]
)
# The length is limited, since a template is repeated for each label.
template: Reader = TypeAdapter(
    Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS), AfterValidator(_check_template)]
)
# For single texts, "longest_first" and "only_first" mean the same as True.
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


def generation(max_tokens: int) -> dict[str, Reader]:
    """Return readers for the parameters of `generate`, with a limit of `max_tokens` tokens."""
    return {
        "do_sample": flag,
        "early_stopping": one_of(True, False, "never"),
        "epsilon_cutoff": number(0, 1),
        "eta_cutoff": number(0, 1),
        "length_penalty": number(-10, 10),
        "max_length": integer(1, max_tokens),
        "max_new_tokens": integer(1, max_tokens),
        "min_length": integer(0, max_tokens),
        "min_new_tokens": integer(0, max_tokens),
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
