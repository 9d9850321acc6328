"""A parser and a writer of Java's properties format, for config.properties."""

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
_ESCAPES = {control: f"\\{letter}" for letter, control in _CONTROLS.items()}


def parse_properties(text: str) -> dict[str, str]:
    r"""Return the keys and values; the last value of a repeated key counts.

    Raises:
        ValueError: A `\u` lacks its four digits.
    """
    values = {}
    for line in _logical_lines(text):
        match = _ENTRY.fullmatch(line)
        assert match is not None  # The pattern matches every line, with an empty key if need be.
        values[_unescape(match["key"])] = _unescape(match["value"])
    return values


def format_properties(values: Mapping[str, str]) -> str:
    """Return one line per key in ASCII, so that a reader may assume any encoding."""
    return "".join(
        f"{_escape_text(key, '=: #!')}={_escape_text(value, '')}\n" for key, value in values.items()
    )


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the lines, without blank lines and comments.

    A line that ends with a backslash is joined with the next one, whose indentation is dropped.
    """
    continued_line: str | None = None
    for raw_line in _LINE_ENDS.split(text):
        line = raw_line.lstrip(_BLANKS)
        if continued_line is None and (not line or line[0] in "#!"):
            continue
        line = (continued_line or "") + line
        # After an odd number of backslashes, the last one is not escaped itself.
        if (len(line) - len(line.rstrip("\\"))) % 2:
            continued_line = line[:-1]
        else:
            continued_line = None
            yield line
    if continued_line:
        yield continued_line


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    unescaped = _ESCAPE.sub(_replacement, text)
    if _SURROGATES.search(unescaped):  # Java writes a character beyond 16 bits as two.
        unescaped = unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return unescaped


def _replacement(match: re.Match[str]) -> str:
    escaped = match[1]
    if len(escaped) == 5:
        return chr(int(escaped[1:], 16))
    if escaped == "u":
        raise ValueError(
            "\\u must be followed by four hexadecimal digits, near"
            f" {match.string[match.start() : match.start() + 20]!r}"
        )
    return _CONTROLS.get(escaped, escaped)


def _escape_text(text: str, special: str) -> str:
    escaped = "".join(_escape_character(character, special) for character in text)
    return f"\\{escaped}" if not special and text.startswith(" ") else escaped


def _escape_character(character: str, special: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character == "\\" or character in special:
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    units = character.encode("utf-16-be")
    return "".join(
        f"\\u{units[index]:02x}{units[index + 1]:02x}" for index in range(0, len(units), 2)
    )
