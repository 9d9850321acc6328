"""The names of members, of models, and of files in a manifest."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath

from tsx_archiver.errors import UnsafePath

DEFAULT_VERSION = "1.0"
MAX_COMPARED_FILES = 1000
MIN_SIMILARITY = 0.8  # difflib's ratio for a typo
MANIFEST_PATH = "MAR-INF/MANIFEST.json"
MANIFEST_DIRECTORIES = ("MAR-INF", "WAR-INF")  # models, workflows
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".mar", ".model")
MAX_NAME_BYTES = 4096
MAX_PART_BYTES = 255

_MODEL_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_\-.]*$")
_DRIVE = re.compile(r"^[A-Za-z]:")


def is_model_name(name: str) -> bool:
    """Tell whether torch-model-archiver allows a model's name."""
    return _MODEL_NAME.fullmatch(name) is not None


def model_name_from(text: str) -> str:
    """Derive a model's name from that of a directory or of a published model."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text).lstrip("_.-") or "model"


def default_model_name(path: PurePath | str) -> str:
    """Derive a model's name from its file: `my-net` from `my-net.pt2`."""
    name = PurePath(path).name
    suffix = next(
        (suffix for suffix in ARCHIVE_SUFFIXES if name.lower().endswith(suffix)),
        PurePath(name).suffix,
    )
    return model_name_from(name[: len(name) - len(suffix)])


def unnamed_archive_name(path: PurePath | str) -> str:
    """Derive the name of a model without a name in its manifest: `my_net` from `my-net.mar`.

    TorchServe does the same.
    """
    return re.sub(r"\W", "_", default_model_name(path))


def path_fault(name: str) -> str | None:
    """Return the reason why a relative path cannot be trusted, or None."""
    if not name:
        return "it is empty"
    if any(unicodedata.category(char) in ("Cc", "Zl", "Zp") for char in name):
        return "it contains control characters"
    if name.startswith("/"):
        return "it is absolute"
    if "\\" in name:
        return "it contains a backslash"
    if _DRIVE.match(name):
        return "it names a drive"
    parts = name.split("/")
    if ".." in parts:
        return "it leaves the directory with '..'"
    if os.name == "nt" and (
        ":" in name or any(part.rstrip(". ") != part for part in parts if part not in ("", "."))
    ):
        return "Windows would read it as another name"
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if max(sizes) > MAX_PART_BYTES or sum(sizes) + len(sizes) > MAX_NAME_BYTES:
        return f"it is too long ({sum(sizes)} bytes)"
    return None


def is_inside(path: Path, directory: Path) -> bool:
    """Tell whether a path lies in a directory after all links are followed.

    The path need not exist.
    """
    try:
        return path.resolve().is_relative_to(directory.resolve())
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # The links form a circle, or the name is impossible.
        return False


def safe_member_name(name: str, source: str) -> str:
    """Normalize the path of a member; the result is empty for the archive's root.

    Raises:
        UnsafePath: The path leads out of the archive, or is otherwise unsafe.
    """
    fault = path_fault(name)
    if fault:
        raise UnsafePath(
            f"{source}: member {shown(name)} is refused: {fault}. Nothing was unpacked. Get it from"
            " a source you trust, or pack it again."
        )
    return normal(name)


def normal(name: str) -> str:
    """Remove `.` and empty parts from a relative path."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def collision_key(name: str) -> str:
    """Return a key that is equal for names that some file systems treat as one.

    Such names differ only in case or in Unicode normalization.
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def shown(name: str) -> str:
    """Quote, escape and shorten a name for a message."""
    text = repr(name)
    return text if len(text) <= 120 else f"{text[:100]}...' ({len(name)} characters)"


def similar_file(path: Path) -> str:
    """Return `; did you mean 'X'?` for a file with a similar name in the same directory."""
    with suppress(OSError, ValueError):
        names = [entry.name for entry in islice(path.parent.iterdir(), MAX_COMPARED_FILES)]
        for name in difflib.get_close_matches(path.name, names, n=1, cutoff=MIN_SIMILARITY):
            return f"; did you mean '{name}'?"
    return ""
