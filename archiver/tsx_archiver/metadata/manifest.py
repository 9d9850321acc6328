"""The manifest of an archive, MAR-INF/MANIFEST.json, whose unknown fields are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tsx_archiver.errors import InvalidManifest
from tsx_archiver.limits import MAX_MANIFEST_BYTES
from tsx_archiver.metadata.safejson import load_json
from tsx_archiver.names import DEFAULT_VERSION, MANIFEST_PATH, normal, path_fault, shown

MAX_MANIFEST_VALUES = 200_000  # enough for checksums of 100,000 members

# tsx's own key: {member: SHA-256 in hex}. TorchServe ignores unknown keys.
CHECKSUMS_KEY = "sha256"

_FILE_KEYS = ("handler", "serializedFile", "modelFile", "requirementsFile", "configFile")


@dataclass(frozen=True)
class Manifest:
    """A checked MANIFEST.json.

    Attributes:
        data: The content of the file, including outdated and unknown fields.
        default_name: The model's name if the file has none.
    """

    data: dict[str, Any] = field(default_factory=dict)
    default_name: str = "model"

    def __post_init__(self) -> None:
        _check(self.data)

    @property
    def model_name(self) -> str:
        return self._text("modelName") or self.default_name

    @property
    def version(self) -> str:
        return self._text("modelVersion") or DEFAULT_VERSION

    @property
    def handler(self) -> str:
        """The handler: `file.py`, `file.py:function`, a built-in name, or an empty string."""
        return self._text("handler") or ""

    @property
    def handler_file(self) -> str:
        """The handler without its function: `file.py`, `file` or a built-in name."""
        return split_handler(self.handler)[0]

    @property
    def serialized_file(self) -> str | None:
        return self._text("serializedFile")

    @property
    def model_file(self) -> str | None:
        return self._text("modelFile")

    @property
    def requirements_file(self) -> str | None:
        return self._text("requirementsFile")

    @property
    def config_file(self) -> str | None:
        return self._text("configFile")

    @property
    def extensions(self) -> Any:
        return self._model.get("extensions")

    @property
    def runtime(self) -> str:
        return str(self.data.get("runtime") or "python")

    @property
    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each member by name; empty for an archive of another archiver."""
        return dict(self.data.get(CHECKSUMS_KEY) or {})

    def missing_files(self, present: Mapping[str, object]) -> list[str]:
        """Return a message for each file that the manifest names and the archive lacks."""
        problems = []
        for key in _FILE_KEYS:
            name = self._text(key)
            if key == "handler":
                name = self.handler_file if self.handler_file.endswith(".py") else None
            if name and normal(name) not in present:
                problems.append(
                    f"the manifest names {key} {name}, which the archive does not contain"
                )
        return problems

    @property
    def _model(self) -> dict[str, Any]:
        return self.data.get("model") or {}

    def _text(self, key: str) -> str | None:
        value = self._model.get(key)
        return None if value is None or value == "" else str(value)


def parse_manifest(content: bytes, *, default_name: str, source: str) -> Manifest:
    """Parse a MANIFEST.json.

    Raises:
        InvalidManifest: The manifest cannot be used; the message names `source`.
    """
    try:
        data = read_manifest_json(content)
    except ValueError as error:
        raise InvalidManifest(
            f"{source}: {MANIFEST_PATH} is not JSON ({error}). Pack the model again."
        ) from error
    if not isinstance(data, dict):
        raise InvalidManifest(
            f"{source}: {MANIFEST_PATH} holds a {type(data).__name__}, not an object. Pack the"
            " model again."
        )
    try:
        return Manifest(data, default_name)
    except InvalidManifest as error:
        raise InvalidManifest(f"{source}: {error.message}") from error


def read_manifest_json(content: bytes) -> Any:
    """Parse the JSON of a manifest, which may begin with a byte order mark.

    Raises:
        ValueError: The content is not JSON, or is too large.
    """
    text = content.decode("utf-8-sig").encode()
    return load_json(text, most_bytes=MAX_MANIFEST_BYTES, most_values=MAX_MANIFEST_VALUES)


def split_handler(handler: str) -> tuple[str, str | None]:
    """Split `file.py:function` into the file and the function, which is None without a colon."""
    file, colon, function = handler.rpartition(":")
    if colon and file and function.isidentifier():
        return file, function
    return handler, None


def handler_fault(handler: str) -> str | None:
    """Return the reason why a handler's name is refused, or None.

    Spaces around it are ignored, as in TorchServe.
    """
    return path_fault(split_handler(handler.strip(" "))[0])


def _check(data: dict[str, Any]) -> None:
    model = data.get("model")
    if model is not None and not isinstance(model, dict):
        raise InvalidManifest(
            f"{MANIFEST_PATH}: model is a {type(model).__name__}, not an object. Pack the model"
            " again."
        )
    checksums = data.get(CHECKSUMS_KEY)
    if checksums is not None and not (
        isinstance(checksums, dict) and all(isinstance(value, str) for value in checksums.values())
    ):
        raise InvalidManifest(
            f"{MANIFEST_PATH}: {CHECKSUMS_KEY} is not an object of strings. Pack the model again."
        )
    for key in ("modelName", "modelVersion", *_FILE_KEYS):
        value = (model or {}).get(key)
        if value is None or value == "":
            continue
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise InvalidManifest(
                f"{MANIFEST_PATH}: {key} is a {type(value).__name__}, not a string. Pack the model"
                " again."
            )
        _check_path(key, str(value))


def _check_path(key: str, value: str) -> None:
    """Refuse a name that leads out of the model's directory or of the model store."""
    fault = handler_fault(value) if key == "handler" else path_fault(value)
    if (
        fault is None
        and key in ("modelName", "modelVersion")
        and ("/" in value or value in (".", ".."))
    ):
        fault = "it is a path"
    if fault:
        raise InvalidManifest(
            f"{MANIFEST_PATH}: {key} {shown(value)} is refused: {fault}. Correct the manifest and"
            " pack the model again."
        )
