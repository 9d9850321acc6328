"""config.properties is parsed as Java does; Java can also read the files that tsx writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.settings.properties import format_properties, parse_properties


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": "1"}),
        ("a: 1\nb 2\n c\t=\t3", {"a": "1", "b": "2", "c": "3"}),
        ("# a=1\n  ! b=2\n\n   \nc=3 # 4", {"c": "3 # 4"}),
        ("a=1\na=2", {"a": "2"}),
        ("a", {"a": ""}),
        ("a==1", {"a": "=1"}),
        ("a = b = c ", {"a": "b = c "}),
        ("a=1, \\\n   2, \\\r\n\t3", {"a": "1, 2, 3"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\\n# no comment", {"a": "1# no comment"}),
        ("a=1\\", {"a": "1"}),
        ("a\\ b\\:c\\=d=e", {"a b:c=d": "e"}),
        (
            'models={\\\n  "noop": {\\\n    "1.0": {}\\\n  }\\\n}',
            {"models": '{"noop": {"1.0": {}}}'},
        ),
        ('m={\\n  "name"\\: \\"x\\"}', {"m": '{\n  "name": "x"}'}),
        ("a=\\u00e9\\ud83d\\ude00\\q", {"a": "é😀q"}),
        ("a=c:\\\\temp", {"a": "c:\\temp"}),
        ("a=http://127.0.0.1:8080", {"a": "http://127.0.0.1:8080"}),
        ("", {}),
    ],
)
def test_properties_are_parsed_as_java_does(text: str, expected: dict[str, str]) -> None:
    assert parse_properties(text) == expected


def test_an_incomplete_unicode_escape_is_reported() -> None:
    with pytest.raises(ValueError, match="four hexadecimal digits, near"):
        parse_properties("store=c:\\users\\me")


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_written_properties_are_read_back(values: dict[str, str]) -> None:
    text = format_properties(values)
    assert text.isascii()
    assert parse_properties(text) == values
