"""Generated Python classes for the models of a server, for editors and type checkers."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from tsx_client.bodies import Signature
from tsx_client.client import Client
from tsx_client.errors import reading

HEAD = """\
{text}

# ruff: noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tsx_client
from tsx_client import FileInput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
"""
MODEL = """

class {name}(tsx_client.Model["Client"]):
    {text}

    if TYPE_CHECKING:

        def predict(self, {arguments}) -> Any: ...
        def stream(self, {arguments}) -> Iterator[tsx_client.Event | str | bytes]: ...


class Async{name}(tsx_client.Model["AsyncClient"]):
    {text}

    if TYPE_CHECKING:

        async def predict(self, {arguments}) -> Any: ...
        def stream(self, {arguments}) -> AsyncIterator[tsx_client.Event | str | bytes]: ...
"""
CLIENT = """

class {prefix}Models(tsx_client.Models["{prefix}Client"]):
{models}

class {prefix}Client(tsx_client.{prefix}Client):
    if TYPE_CHECKING:
        models: {prefix}Models
"""
TYPES = {"text": "str", "image": "FileInput", "file": "FileInput", "json": "Any"}
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
    for name, metadata in named_models.items():
        signature = Signature.of(metadata)
        versions = ", ".join(metadata.get("versions", ()))
        description = repr(f"Versions {versions}." + _describe_inputs(signature))
        text += MODEL.format(name=classes[name], text=description, arguments=_arguments(signature))
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


def _arguments(signature: Signature) -> str:
    kind = "Any" if signature.tensors else TYPES.get(signature.kind or "", "Any")
    names = signature.names
    if not names or RESERVED & set(names) or not all(map(_is_identifier, names)):
        return f"payload: Any = None, /, *, {OPTIONS}, **inputs: Any"
    return f"*, {', '.join(f'{name}: {kind}' for name in names)}, {OPTIONS}"
