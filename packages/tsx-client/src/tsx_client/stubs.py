"""Generated Python classes for the models of a server, for editors and type checkers."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from tsx_client.bodies import Signature, resolve
from tsx_client.client import Client
from tsx_client.errors import reading

HEAD = """\
{text}

# ruff: noqa: E501, F401

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

import tsx_client
from tsx_client import FileInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from typing_extensions import NotRequired
"""
MODEL = """

class {name}(tsx_client.Model["Client"]):
    {text}

    if TYPE_CHECKING:

        def predict(self, {arguments}) -> {answer}: ...
        def stream(self, {arguments}) -> Iterator[{piece}]: ...


class Async{name}(tsx_client.Model["AsyncClient"]):
    {text}

    if TYPE_CHECKING:

        async def predict(self, {arguments}) -> {answer}: ...
        def stream(self, {arguments}) -> AsyncIterator[{piece}]: ...
"""
TYPED_DICT = """

class {name}(TypedDict):
    {fields}
"""
EVENT = """

if TYPE_CHECKING:

    class {name}(tsx_client.Event):
        def json(self) -> {answer}: ...
"""
CLIENT = """

class {prefix}Models(tsx_client.Models["{prefix}Client"]):
{models}

class {prefix}Client(tsx_client.{prefix}Client):
    if TYPE_CHECKING:
        models: {prefix}Models
"""
TYPES = {"text": "str", "image": "FileInput", "file": "FileInput", "json": "Any"}
JSON_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
}
# As the name of a field, each of these would hide the type in its class.
TYPE_NAMES = {*JSON_TYPES.values(), "Any", "FileInput", "Literal", "NotRequired", "dict", "list"}
PIECE = "tsx_client.Event | str | bytes"
OPTIONS = (
    "version: str | None = None, timeout: float | None = None, headers: dict[str, str] | None ="
    " None"
)
RESERVED = {"self", "version", "timeout", "headers"}  # arguments of `predict` itself


def generate(client: Client) -> str:
    """Generate a module for the models of the client's server."""
    with reading("The list of models or their metadata"):
        return render(client.url, {name: client.metadata(name) for name in client.model_names()})


def render(url: str, models: Mapping[str, Mapping[str, Any]]) -> str:
    """Generate a module from the models' metadata; names must be identifiers, or are left out."""
    named_models = {
        name: metadata for name, metadata in sorted(models.items()) if _is_identifier(name)
    }
    title = f"The models of {url}. Made by `tsx client generate`: make it anew when they change."
    text = HEAD.format(text=repr(title))
    classes = _class_names(named_models)
    used_names = {f"{prefix}{name}" for name in classes.values() for prefix in ("", "Async")}
    for name, metadata in named_models.items():
        signature = Signature.of(metadata)
        versions = ", ".join(metadata.get("versions", ()))
        typed = metadata.get("signature") or {}
        summary = str(typed.get("description", "")).partition("\n")[0]
        description = repr(f"{summary} Versions {versions}.{_describe_inputs(signature)}".lstrip())
        types = _Types(classes[name].removesuffix("Model"), typed, used_names)
        parts = types.describe(signature)
        text += types.text + MODEL.format(name=classes[name], text=description, **parts)
    for prefix in ("", "Async"):
        lines = [f"    {name}: {prefix}{classes[name]}\n" for name in named_models]
        text += CLIENT.format(prefix=prefix, models="".join(lines) or "    pass\n")
    return text


def _is_identifier(name: str) -> bool:
    """Tell whether a name is an identifier in the form that Python normalizes it to."""
    is_normalized = unicodedata.normalize("NFKC", name) == name and not name.startswith("__")
    return name.isidentifier() and is_normalized and not keyword.iskeyword(name)


def _class_names(models: Iterable[str]) -> dict[str, str]:
    """Choose a class name for each model; `a_b`, `aB` and `async_a_b` get different ones."""
    names: dict[str, str] = {}
    used_names: set[str] = set()
    for model in models:
        name = "".join(part[:1].upper() + part[1:] for part in model.split("_")) + "Model"
        while {name, f"Async{name}"} & used_names:
            name += "_"
        used_names |= {name, f"Async{name}"}
        names[model] = name
    return names


def _describe_inputs(signature: Signature) -> str:
    return "".join(
        f" {name}: {kind} of shape {shape}." for name, (kind, shape) in signature.tensors.items()
    )


class _Types:
    """The types of a model with a signature.

    Attributes:
        text: The classes that they need.
    """

    def __init__(self, name: str, signature: Mapping[str, Any], used_names: set[str]) -> None:
        self._name, self._signature, self._used_names = name, signature, used_names
        self._root: Mapping[str, Any] = {}  # the schema whose definitions are meant
        self._is_input = True
        self._definitions: dict[str, str] = {}  # annotations by the names of definitions
        self.text = ""

    def describe(self, signature: Signature) -> dict[str, str]:
        """Return the arguments of a model's calls, its answer, and a piece of its stream."""
        if not self._signature:
            return {"arguments": _arguments(signature), "answer": "Any", "piece": PIECE}
        arguments = self._describe_arguments(signature)
        self._root, self._is_input, self._definitions = self._signature["output"], False, {}
        answer = self._annotate(self._root, f"{self._name}Output")
        if self._signature["streams"]:
            name = self._new_name(f"{self._name}Event")
            self.text += EVENT.format(name=name, answer=answer)
            return {"arguments": arguments, "answer": "str", "piece": name}
        kind = self._signature["outputType"]
        if kind != "application/json":
            answer = "str" if kind.startswith("text/") else "bytes"
        return {"arguments": arguments, "answer": answer, "piece": PIECE}

    def _describe_arguments(self, signature: Signature) -> str:
        self._root = root = self._signature["input"]
        name, names = f"{self._name}Input", signature.fields
        if not names or RESERVED & set(names) or not all(map(_is_identifier, names)):
            kind = self._annotate(root, name)
            if self._signature["contentTypes"] != ["application/json"]:
                kind += " | FileInput"
            return f"payload: {kind}, /, *, {OPTIONS}"
        required = resolve(root, root).get("required", ())
        arguments = [
            f"{field}: {self._annotate(schema, f'{name}_{field}')}"
            + ("" if field in required else " = ...")
            for field, schema in names.items()
        ]
        return f"*, {', '.join(arguments)}, {OPTIONS}"

    def _annotate(self, schema: Mapping[str, Any], name: str) -> str:
        """Return the annotation for a JSON schema; a class for it gets this name."""
        if not schema or not isinstance(schema, Mapping):  # true and false are schemas too.
            return "Any"
        if "$ref" in schema:
            return self._annotate_definition(schema)
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            is_literal = all(value is None or isinstance(value, str | int) for value in values)
            return f"Literal[{', '.join(map(repr, values))}]" if is_literal and values else "Any"
        kind = schema.get("type")
        options = schema.get("anyOf") or schema.get("oneOf") or ()
        if isinstance(kind, list):
            options = [{**schema, "type": option} for option in kind]
        if options:
            return " | ".join(dict.fromkeys(self._annotate(option, name) for option in options))
        if self._is_input and {"contentEncoding", "contentMediaType"} & set(schema):
            return "FileInput"
        if kind == "array":
            return f"list[{self._annotate(schema.get('items', {}), name)}]"
        if kind == "object" and schema.get("properties"):
            return self._add_class(schema, self._new_name(name))
        if kind == "object":
            return f"dict[str, {self._annotate(schema.get('additionalProperties', {}), name)}]"
        return JSON_TYPES.get(str(kind), "Any")

    def _annotate_definition(self, reference: Mapping[str, Any]) -> str:
        schema, key = resolve(reference, self._root), str(reference["$ref"])
        if key not in self._definitions:
            parts = re.findall("[A-Za-z0-9]+", key.rpartition("/")[2])
            side = "Input" if self._is_input else "Output"
            name = f"{self._name}{side}{''.join(part[:1].upper() + part[1:] for part in parts)}"
            self._definitions[key] = "Any"  # A type that consists of itself ends here.
            if schema.get("properties"):
                self._definitions[key] = name = self._new_name(name)
                self._definitions[key] = self._add_class(schema, name)
            else:
                self._definitions[key] = self._annotate(schema, name)
        return self._definitions[key]

    def _add_class(self, schema: Mapping[str, Any], name: str) -> str:
        """Add a TypedDict; field names that are no identifiers make it a `dict`."""
        properties, required = schema["properties"], schema.get("required", ())
        if TYPE_NAMES & set(properties) or not all(map(_is_identifier, properties)):
            return "dict[str, Any]"
        fields = []
        for field, field_schema in properties.items():
            kind = self._annotate(field_schema, f"{name}_{field}")
            fields.append(f"{field}: {kind if field in required else f'NotRequired[{kind}]'}")
        self.text += TYPED_DICT.format(name=name, fields="\n    ".join(fields))
        return name

    def _new_name(self, name: str) -> str:
        while name in self._used_names:
            name += "_"
        self._used_names.add(name)
        return name


def _arguments(signature: Signature) -> str:
    kind = "Any" if signature.tensors else TYPES.get(signature.kind or "", "Any")
    names = signature.names
    if not names or RESERVED & set(names) or not all(map(_is_identifier, names)):
        return f"payload: Any = None, /, *, {OPTIONS}, **inputs: Any"
    return f"*, {', '.join(f'{name}: {kind}' for name in names)}, {OPTIONS}"
