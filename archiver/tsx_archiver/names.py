"""Checks names of members, of models, and of files in a manifest."""

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
MOST_BESIDE = 1000  # files whose names are compared with that of a missing one
NEAR = 0.8  # difflib's ratio of two names of which one is a slip
MANIFEST_PATH = "MAR-INF/MANIFEST.json"
MANIFEST_DIRECTORIES = ("MAR-INF", "WAR-INF")  # of models, of workflows
ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".mar", ".model")
MAX_NAME_BYTES = 4096
MAX_PART_BYTES = 255

_MODEL_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_\-.]*$")
_DRIVE = re.compile(r"^[A-Za-z]:")


def is_model_name(name: str) -> bool:
    """The names that torch-model-archiver allows."""
    return _MODEL_NAME.fullmatch(name) is not None


def model_name_from(text: str) -> str:
    """Turn the name of a directory or of a published model into a model's name; `my-net.v2`
    stays.
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text).lstrip("_.-") or "model"


def default_model_name(path: PurePath | str) -> str:
    """Derive a model's name from its file's, without the suffix: `my-net.pt2` is `my-net`."""
    name = PurePath(path).name
    suffix = next(
        (suffix for suffix in ARCHIVE_SUFFIXES if name.lower().endswith(suffix)),
        PurePath(name).suffix,
    )
    return model_name_from(name[: len(name) - len(suffix)])


def unnamed_archive_name(path: PurePath | str) -> str:
    """Name the model of an archive whose manifest has no name, as TorchServe does: `my-net.mar` is
    `my_net`.
    """
    return re.sub(r"\W", "_", default_model_name(path))


def path_fault(name: str) -> str | None:
    """Why a relative path with `/` between its parts could not be trusted, or None."""
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
    """Whether the path, with all links followed, lies in the directory.

    Of what is not there, whether it would.
    """
    try:
        return path.resolve().is_relative_to(directory.resolve())
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # links that lead in a circle, and what no file can be called
        return False


def safe_member_name(name: str, source: str) -> str:
    """The member's path in one spelling (no `.`, no empty part), empty for the archive's own root.

    Raises UnsafePath, which names `source`.
    """
    fault = path_fault(name)
    if fault:
        raise UnsafePath(
            f"{source}: member {shown(name)} is refused: {fault}. Nothing was unpacked. Get it from"
            " a source you trust, or pack it again."
        )
    return normal(name)


def normal(name: str) -> str:
    """A relative path without `.` and empty parts."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def collision_key(name: str) -> str:
    """Equal for two names that some file system holds for one: they differ by case or by Unicode
    normalisation only.
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def shown(name: str) -> str:
    """A name fit for a message: quoted, escaped, and short."""
    text = repr(name)
    return text if len(text) <= 120 else f"{text[:100]}...' ({len(name)} characters)"


def similar_file(path: Path) -> str:
    """Return `; did you mean 'X'?` for the file beside a missing one that has nearly its name."""
    with suppress(OSError, ValueError):
        names = [entry.name for entry in islice(path.parent.iterdir(), MOST_BESIDE)]
        for near in difflib.get_close_matches(path.name, names, n=1, cutoff=NEAR):
            return f"; did you mean '{near}'?"
    return ""
