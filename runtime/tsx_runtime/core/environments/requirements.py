"""Checks an archive's requirements file before pip reads it. Contract sections 5.7 and 10, row 13.

pip is started without a shell, so nothing in the file is ever run by one. What is refused here is
what would lead it out of the model's directory, or is no requirement at all; the error names the
line.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

MOST_BYTES = 1 << 20  # of a requirements file
LONGEST_LINE = (
    32 << 10
    # characters, with the lines that continue it: a requirement with a hundred hashes has ten
    # thousand
)
MOST_FILES = 32  # that include each other
REMOTE = (
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
# which ends before the hashes, so that there is one way to read a line
_MARKER = r"(?:\s*;(?:(?!\s--hash)[^;`|&$\\])*)?"
_HASHES = r"(?:\s+--hash[= ][a-z0-9]+:[0-9a-f]+)*"
_NAMED = re.compile(
    rf"{_NAME}\s*(?:\[[A-Za-z0-9._,\s-]*\])?\s*(?:\(?\s*{_VERSIONS}(?:\s*,\s*{_VERSIONS})*\s*,?\s*\)?)?{_MARKER}{_HASHES}\s*"
)
_AT = re.compile(
    rf"{_NAME}\s*(?:\[[A-Za-z0-9._,\s-]*\])?\s*@\s*(?P<url>[^\s;]+){_MARKER}{_HASHES}\s*"
)
_PLACE = re.compile(rf"(?P<place>[^\s;`|&$\\]+){_MARKER}{_HASHES}\s*")
_BLANKS = re.compile(
    r"[ \t\f\v]+"
)  # of several blanks in a row the other patterns would try every way to share them out
_COMMENT = re.compile(r"(^|\s)#.*$")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class BadRequirements(ValueError):
    """The file cannot be passed to pip; the message names the line and the reason."""


class Requirements(NamedTuple):
    """`inputs` is what decides what will be installed: the files' own text, and a digest of what
    they take from the archive.
    """

    file: Path | None  # None: nothing is asked for
    wheel_places: tuple[Path, ...]  # directories of the archive that hold wheels
    inputs: tuple[tuple[str, str], ...]


class _Found(NamedTuple):
    """By paths in the archive.

    A file that is part of a package is checked all the same where it is included as well.
    """

    texts: dict[str, str]  # of requirements files, which are checked
    digests: dict[str, str]  # of what they take from the archive


NOTHING = Requirements(None, (), ())


def read_requirements(model_dir: Path, name: str | None) -> Requirements:
    """Read and check the file, and those that it includes. Raises BadRequirements, OSError."""
    if not name:
        return NOTHING
    inside = model_dir.resolve()
    file = _inside(inside, model_dir / name, name)
    found = _Found({}, {})
    _read(file, inside, found)
    wheels = sorted(path for path in inside.rglob("*") if path.suffix in WHEELS and path.is_file())
    inputs = {
        **found.digests,
        **{str(wheel.relative_to(inside)): _digest(wheel) for wheel in wheels},
        **found.texts,
    }
    return Requirements(
        file, tuple(dict.fromkeys(wheel.parent for wheel in wheels)), tuple(sorted(inputs.items()))
    )


def _read(file: Path, inside: Path, found: _Found) -> None:
    name = str(file.relative_to(inside))
    if name in found.texts:
        return
    if len(found.texts) >= MOST_FILES:
        raise BadRequirements(f"{name} and the files that it includes are more than {MOST_FILES}")
    content = file.read_bytes()
    if len(content) > MOST_BYTES:
        raise BadRequirements(f"{name} has {len(content)} bytes; at most {MOST_BYTES} are read")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequirements(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    found.texts[name] = text
    for number, line in _lines(text):
        try:
            _check_line(line, file, inside, found)
        except ValueError as error:
            if isinstance(error, BadRequirements) and error.args[0].startswith("line "):
                raise  # of a file that this one includes
            raise BadRequirements(f"line {number} of {name}, {line[:100]!r}: {error}") from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines, by pip's rules: a backslash at the end goes on, '#' after a space is a
    comment.
    """
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        first = first or number
        if line.endswith("\\"):
            pending += line[:-1].strip() + " "
            continue
        whole = _COMMENT.sub("", _BLANKS.sub(" ", pending + line)).strip()
        if whole:
            yield first, whole
        pending, first = "", 0
    if pending.strip():
        yield first, _BLANKS.sub(" ", pending).strip()


def _check_line(line: str, file: Path, inside: Path, found: _Found) -> None:
    if len(line) > LONGEST_LINE:
        raise BadRequirements(f"it has {len(line)} characters; at most {LONGEST_LINE} are read")
    if any(ord(character) < 32 and character != "\t" for character in line):
        raise BadRequirements("it contains control characters")
    if line.startswith("-"):
        _check_option(line, file, inside, found)
    elif match := _AT.fullmatch(line):
        _check_place(match["url"], inside, found)
    elif not _NAMED.fullmatch(line):
        match = _PLACE.fullmatch(line)
        if match is None or not (
            "/" in match["place"] or match["place"].endswith((".whl", ".tar.gz", ".zip"))
        ):
            raise BadRequirements(
                "it is not a requirement. Write it as NAME, NAME==VERSION, a path in the archive or"
                " a URL"
            )
        _check_place(match["place"], inside, found)


def _check_option(line: str, file: Path, inside: Path, found: _Found) -> None:
    words = [
        word
        for part in shlex.split(line)
        for word in (part.split("=", 1) if part.startswith("--") else [part])
    ]
    option, values = words[0], words[1:]
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
        _read(_inside(inside, file.parent / value, value), inside, found)
    elif option in LINK_OPTIONS and not _is_remote(value):
        _inside(inside, file.parent / _path_of(value), value)
    elif option in INDEX_OPTIONS[:-1] and not _is_remote(value):
        raise BadRequirements("an index is a URL that begins with https:// or http://")


def _check_place(place: str, inside: Path, found: _Found) -> None:
    """Of a package: a URL, or a file or directory of the archive, whose content then decides what
    is installed.
    """
    if _is_remote(place):
        return
    path = _inside(inside, inside / _path_of(place), place)
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if each.is_file():
            found.digests.setdefault(
                str(each.relative_to(inside)), _digest(_inside(inside, each, place))
            )


def _is_remote(place: str) -> bool:
    return "://" in place and urlsplit(place).scheme.lower() in REMOTE


def _path_of(place: str) -> str:
    """The path that pip would take it for.

    Raises BadRequirements for other URLs than those of files.
    """
    place = re.sub(r"\[[A-Za-z0-9._,\s-]*\]$", "", place)
    if place.lower().startswith("file:"):
        parts = urlsplit(place)
        if parts.netloc not in ("", "localhost"):
            raise BadRequirements("a file: URL may not name another machine")
        return unquote(parts.path)
    if _URL.match(place):
        raise BadRequirements(
            f"a URL must begin with one of {', '.join(f'{scheme}://' for scheme in REMOTE)}"
        )
    return place


def _inside(inside: Path, path: Path, name: str) -> Path:
    """The path, with all links followed.

    Raises BadRequirements where it leads out of the archive, or to nothing.
    """
    try:
        found = path.resolve()
        there = found.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise BadRequirements(f"{name} is no path: {error}") from error
    if not found.is_relative_to(inside):
        raise BadRequirements(f"{name} is outside the archive. Name a file in the archive")
    if not there:
        raise BadRequirements(f"{name} is not in the archive. Add it with --extra-files")
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.sha256()
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
