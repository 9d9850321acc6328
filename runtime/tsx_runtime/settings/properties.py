"""Java's properties format, for config.properties: read like Java, and written so that Java can
read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_BLANKS = " \t\f"
_LINE_ENDS = re.compile(r"\r\n|\r|\n")
_ENTRY = re.compile(
    r"(?P<key>(?:\\.|[^\\=: \t\f])*)[ \t\f]*(?:[=:][ \t\f]*)?(?P<value>.*)", re.DOTALL
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.?)", re.DOTALL)
_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_NAMES = {control: f"\\{name}" for name, control in _CONTROLS.items()}


def parse_properties(text: str) -> dict[str, str]:
    """Keys and values; of a key that is there twice the last value counts.

    Raises ValueError for a `\\u` without its four digits.
    """
    values = {}
    for line in _logical_lines(text):
        match = _ENTRY.fullmatch(line)
        assert match is not None  # an empty key with everything as its value would match
        values[_unescape(match["key"])] = _unescape(match["value"])
    return values


def format_properties(values: Mapping[str, str]) -> str:
    """One line a key, in ASCII, so that it does not matter as which encoding the file is read."""
    return "".join(
        f"{_escape(key, '=: #!')}={_escape(value, '')}\n" for key, value in values.items()
    )


def _logical_lines(text: str) -> Iterator[str]:
    """Without blank lines and comments; a line that ends with a backslash goes on in the next,
    whose indentation does not count.
    """
    pending: str | None = None
    for natural in _LINE_ENDS.split(text):
        line = natural.lstrip(_BLANKS)
        if pending is None and (not line or line[0] in "#!"):
            continue
        line = (pending or "") + line
        if (
            len(line) - len(line.rstrip("\\"))
        ) % 2:  # it ends with a backslash that is not escaped by another
            pending = line[:-1]
        else:
            pending = None
            yield line
    if pending:
        yield pending


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_meaning, text)
    if _SURROGATES.search(plain):  # Java writes what is beyond 16 bits as two
        plain = plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return plain


def _meaning(match: re.Match[str]) -> str:
    escaped = match[1]
    if len(escaped) == 5:
        return chr(int(escaped[1:], 16))
    if escaped == "u":
        raise ValueError(
            "\\u must be followed by four hexadecimal digits, near"
            f" {match.string[match.start() : match.start() + 20]!r}"
        )
    return _CONTROLS.get(escaped, escaped)


def _escape(text: str, special: str) -> str:
    written = "".join(_escaped(character, special) for character in text)
    return f"\\{written}" if not special and text.startswith(" ") else written


def _escaped(character: str, special: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    if character == "\\" or character in special:
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    code = character.encode("utf-16-be")
    return "".join(f"\\u{code[at]:02x}{code[at + 1]:02x}" for at in range(0, len(code), 2))
