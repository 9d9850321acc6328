"""Checks an archive's requirements file before pip reads it.

pip starts without a shell, so no shell runs a line of the file. The check refuses lines that lead
out of the model's directory, and lines that are not requirements. Its error names the line.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

MAX_FILE_BYTES = 1 << 20
MAX_LINE_CHARS = 32 << 10  # A requirement with a hundred hashes has ten thousand characters.
MAX_FILES = 32  # files that include each other
REMOTE_SCHEMES = (
    "http",
    "https",
    "git+https",
    "git+http",
    "git+ssh",
    "hg+https",
    "svn+https",
    "bzr+https",
    "ssh",
)
INDEX_OPTIONS = ("-i", "--index-url", "--pypi-url", "--extra-index-url", "--trusted-host")
VALUE_OPTIONS = ("--no-binary", "--only-binary", "--use-feature", *INDEX_OPTIONS)
FLAG_OPTIONS = ("--no-index", "--prefer-binary", "--require-hashes", "--pre")
FILE_OPTIONS = ("-r", "--requirement", "-c", "--constraint")
LINK_OPTIONS = ("-f", "--find-links")
WHEELS = (".whl",)

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSIONS = r"(?:===?|~=|!=|<=?|>=?)\s*[A-Za-z0-9.*+!_-]+"
# A marker ends before the hashes, so that a line has only one parse: several would be slow.
_MARKER = r"(?:\s*;(?:(?!\s--hash)[^;`|&$\\])*)?"
_HASHES = r"(?:\s+--hash[= ][a-z0-9]+:[0-9a-f]+)*"
_NAMED_PACKAGE = re.compile(
    rf"{_NAME}\s*(?:\[[A-Za-z0-9._,\s-]*\])?\s*(?:\(?\s*{_VERSIONS}(?:\s*,\s*{_VERSIONS})*\s*,?\s*\)?)?{_MARKER}{_HASHES}\s*"
)
_PACKAGE_AT_URL = re.compile(
    rf"{_NAME}\s*(?:\[[A-Za-z0-9._,\s-]*\])?\s*@\s*(?P<url>[^\s;]+){_MARKER}{_HASHES}\s*"
)
_LOCATION = re.compile(rf"(?P<location>[^\s;`|&$\\]+){_MARKER}{_HASHES}\s*")
# Several blanks in a row would make the other patterns slow.
_BLANKS = re.compile(r"[ \t\f\v]+")
_COMMENT = re.compile(r"(^|\s)#.*$")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class BadRequirements(ValueError):
    """The file cannot be passed to pip; the message names the line and the reason."""


class Requirements(NamedTuple):
    """A checked requirements file, and the inputs that decide what is installed.

    The inputs are the texts of the requirements files, and digests of the packages in the archive.
    """

    file: Path | None  # None if there are no requirements
    wheel_directories: tuple[Path, ...]  # directories of the archive that hold wheels
    inputs: tuple[tuple[str, str], ...]


class _Contents(NamedTuple):
    """The files that requirements name, by their path in the archive.

    A file may be in both: `texts` holds only requirements files, each of which is checked.
    """

    texts: dict[str, str]  # checked requirements files
    digests: dict[str, str]  # files of packages


NO_REQUIREMENTS = Requirements(None, (), ())


def read_requirements(model_dir: Path, name: str | None) -> Requirements:
    """Read and check a requirements file and the files that it includes.

    Raises:
        BadRequirements: A line is refused, or a file is missing, too large or not text.
        OSError: A file cannot be read.
    """
    if not name:
        return NO_REQUIREMENTS
    archive_root = model_dir.resolve()
    file = _resolve_inside(archive_root, model_dir / name, name)
    contents = _Contents({}, {})
    _read(file, archive_root, contents)
    wheels = sorted(
        path for path in archive_root.rglob("*") if path.suffix in WHEELS and path.is_file()
    )
    inputs = {
        **contents.digests,
        **{str(wheel.relative_to(archive_root)): _digest(wheel) for wheel in wheels},
        **contents.texts,
    }
    return Requirements(
        file, tuple(dict.fromkeys(wheel.parent for wheel in wheels)), tuple(sorted(inputs.items()))
    )


def _read(file: Path, archive_root: Path, contents: _Contents) -> None:
    name = str(file.relative_to(archive_root))
    if name in contents.texts:
        return
    if len(contents.texts) >= MAX_FILES:
        raise BadRequirements(f"{name} and the files that it includes are more than {MAX_FILES}")
    content = file.read_bytes()
    if len(content) > MAX_FILE_BYTES:
        raise BadRequirements(f"{name} has {len(content)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequirements(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    contents.texts[name] = text
    for number, line in _lines(text):
        try:
            _check_line(line, file, archive_root, contents)
        except ValueError as error:
            if isinstance(error, BadRequirements) and error.args[0].startswith("line "):
                raise  # The line belongs to a file that this one includes.
            raise BadRequirements(f"line {number} of {name}, {line[:100]!r}: {error}") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield logical lines with their numbers, by pip's rules for continuations and comments."""
    pending, first_number = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        first_number = first_number or number
        if line.endswith("\\"):
            pending += line[:-1].strip() + " "
            continue
        logical_line = _COMMENT.sub("", _BLANKS.sub(" ", pending + line)).strip()
        if logical_line:
            yield first_number, logical_line
        pending, first_number = "", 0
    if pending.strip():
        yield first_number, _BLANKS.sub(" ", pending).strip()


def _check_line(line: str, file: Path, archive_root: Path, contents: _Contents) -> None:
    if len(line) > MAX_LINE_CHARS:
        raise BadRequirements(f"it has {len(line)} characters; at most {MAX_LINE_CHARS} are read")
    if any(ord(character) < 32 and character != "\t" for character in line):
        raise BadRequirements("it contains control characters")
    if line.startswith("-"):
        _check_option(line, file, archive_root, contents)
    elif match := _PACKAGE_AT_URL.fullmatch(line):
        _check_location(match["url"], archive_root, contents)
    elif not _NAMED_PACKAGE.fullmatch(line):
        match = _LOCATION.fullmatch(line)
        if match is None or not (
            "/" in match["location"] or match["location"].endswith((".whl", ".tar.gz", ".zip"))
        ):
            raise BadRequirements(
                "it is not a requirement. Write it as NAME, NAME==VERSION, a path in the archive or"
                " a URL"
            )
        _check_location(match["location"], archive_root, contents)


def _check_option(line: str, file: Path, archive_root: Path, contents: _Contents) -> None:
    arguments = [
        argument
        for part in shlex.split(line)
        for argument in (part.split("=", 1) if part.startswith("--") else [part])
    ]
    option, values = arguments[0], arguments[1:]
    if option[:2] in ("-r", "-c", "-f", "-i") and len(option) > 2 and option[1] != "-":
        option, values = option[:2], [option[2:], *values]
    if option in FLAG_OPTIONS and not values:
        return
    if option not in (*VALUE_OPTIONS, *FILE_OPTIONS, *LINK_OPTIONS) or len(values) != 1:
        raise BadRequirements(
            "a requirements file of an archive must not contain this option. Remove it"
        )
    [value] = values
    if option in FILE_OPTIONS:
        _read(_resolve_inside(archive_root, file.parent / value, value), archive_root, contents)
    elif option in LINK_OPTIONS and not _is_remote(value):
        _resolve_inside(archive_root, file.parent / _path_of(value), value)
    elif option in INDEX_OPTIONS[:-1] and not _is_remote(value):
        raise BadRequirements("an index is a URL that begins with https:// or http://")


def _check_location(location: str, archive_root: Path, contents: _Contents) -> None:
    """Check the URL or path of a package, and record the digests of its files."""
    if _is_remote(location):
        return
    path = _resolve_inside(archive_root, archive_root / _path_of(location), location)
    for member in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if member.is_file():
            contents.digests.setdefault(
                str(member.relative_to(archive_root)),
                _digest(_resolve_inside(archive_root, member, location)),
            )


def _is_remote(location: str) -> bool:
    return "://" in location and urlsplit(location).scheme.lower() in REMOTE_SCHEMES


def _path_of(location: str) -> str:
    """Return the path that pip would take from a location.

    Raises:
        BadRequirements: The location is a URL that does not name a file of this machine.
    """
    location = re.sub(r"\[[A-Za-z0-9._,\s-]*\]$", "", location)
    if location.lower().startswith("file:"):
        parts = urlsplit(location)
        if parts.netloc not in ("", "localhost"):
            raise BadRequirements("a file: URL may not name another machine")
        return unquote(parts.path)
    if _URL.match(location):
        raise BadRequirements(
            f"a URL must begin with one of {', '.join(f'{scheme}://' for scheme in REMOTE_SCHEMES)}"
        )
    return location


def _resolve_inside(archive_root: Path, path: Path, name: str) -> Path:
    """Return a path with all links followed.

    Raises:
        BadRequirements: The path leads out of the archive, or does not exist.
    """
    try:
        resolved = path.resolve()
        exists = resolved.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise BadRequirements(f"{name} is no path: {error}") from error
    if not resolved.is_relative_to(archive_root):
        raise BadRequirements(f"{name} is outside the archive. Name a file in the archive")
    if not exists:
        raise BadRequirements(f"{name} is not in the archive. Add it with --extra-files")
    return resolved


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
