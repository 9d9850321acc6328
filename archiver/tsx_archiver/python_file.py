"""The entry of the manifest for a model from a Python file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tsx_archiver.metadata.manifest import Manifest

HANDLER = "python_file"
LITSERVE = "litserve_api"  # the handler of LitServe's classes
MANIFEST_KEY = "pythonFile"
# The method of a class, or the function, that answers requests, and its parameter for batches.
METHOD, BATCH = "predict", "batch"


class PythonFileFacts(NamedTuple):
    """What the server knows about a Python file without running it.

    Attributes:
        file: The name of the file in the archive.
        name: The name of the class or function in the file.
        is_batched: Whether it takes a list of requests.
        is_async: Whether each request is a task of an event loop.
        attributes: Attributes that the object gets, such as `stream` of LitServe.
    """

    file: str
    name: str
    is_batched: bool = False
    is_async: bool = False
    attributes: Mapping[str, Any] = {}

    def as_manifest(self) -> dict[str, Any]:
        """Return the entry of the manifest, without empty attributes."""
        fields = self._asdict()
        return {MANIFEST_KEY: {name: fields[name] for name in fields if fields[name] != {}}}


def read_facts(manifest: Manifest) -> PythonFileFacts:
    """Read the entry of a manifest; fields that are missing or have another type are empty."""
    entry = manifest.data.get(MANIFEST_KEY)
    values = entry if isinstance(entry, dict) else {}
    attributes = values.get("attributes", {})
    return PythonFileFacts(
        str(values.get("file", "")),
        str(values.get("name", "")),
        values.get("is_batched") is True,
        values.get("is_async") is True,
        attributes if isinstance(attributes, dict) else {},
    )
