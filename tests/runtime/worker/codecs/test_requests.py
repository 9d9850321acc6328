"""The rows of a handler, made from bodies, forms and query strings."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.errors import BadRequest
from tsx_runtime.wire import INPUTS, request_meta
from tsx_runtime.worker.codecs.requests import read_row

BOUNDARY = "xyz"
FORM = "application/x-www-form-urlencoded"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


class Row(NamedTuple):
    inputs: dict[str, Any]
    parts: dict[str, dict[str, str]] | None


def read(
    body: bytes,
    content_type: str | None = None,
    query: bytes = b"",
    *,
    decode: bool = True,
    name: bytes = b"Content-Type",
) -> Row:
    headers = [(b"Host", b"here")] + (
        [] if content_type is None else [(name, content_type.encode("latin-1"))]
    )
    return Row(
        *read_row(str(request_meta("id", query, headers), "latin-1"), memoryview(body), decode)
    )


def inputs(
    body: bytes, content_type: str | None = None, query: bytes = b"", **options: Any
) -> dict[str, Any]:
    return read(body, content_type, query, **options).inputs


def multipart(*parts: tuple[str, bytes], has_end: bool = True) -> bytes:
    lines = b"".join(
        b"--xyz\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n" for head, value in parts
    )
    return lines + (b"--xyz--\r\n" if has_end else b"")


def part_head(name: str, *headers: str) -> str:
    return "\r\n".join(
        [
            f'Content-Disposition: form-data; name="{name}"'
            + ("" if not headers else f"; {headers[0]}"),
            *headers[1:],
        ]
    )


def test_a_body_without_content_type_is_a_bytearray() -> None:
    body = inputs(b"\x00\x01")["body"]
    assert body == bytearray(b"\x00\x01")
    assert type(body) is bytearray


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"]
)
def test_json_is_parsed(content_type: str) -> None:
    body = '{"a": [1, "ä"]}'.encode()
    assert inputs(body, content_type, name=b"content-TYPE") == {"body": {"a": [1, "ä"]}}


def test_a_header_whose_name_ends_in_content_type_is_ignored() -> None:
    assert inputs(b"[1]", "application/json", name=b"X-Content-Type") == {"body": bytearray(b"[1]")}


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe\x00", b"[" * 100_000])
def test_bad_json_is_raw_bytes_with_a_warning(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert inputs(body, "application/json") == {"body": bytearray(body)}
    assert "a body with a JSON content type is not JSON" in caplog.text


@pytest.mark.parametrize("content_type", ["text/plain", "text/html; charset=utf-8", "TEXT/CSV"])
def test_text_is_a_string(content_type: str) -> None:
    assert inputs("grün".encode(), content_type) == {"body": "grün"}


def test_text_is_decoded_by_its_charset() -> None:
    assert inputs("grün".encode("latin-1"), 'text/plain; charset="ISO-8859-1"') == {"body": "grün"}


@pytest.mark.parametrize(
    ("body", "content_type"), [(b"\xff\xff", "text/plain"), (b"abc", "text/plain; charset=martian")]
)
def test_text_that_cannot_be_decoded_is_raw_bytes_with_a_warning(
    body: bytes, content_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert inputs(body, content_type) == {"body": bytearray(body)}
    assert "cannot be decoded" in caplog.text


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "image/jpeg"])
def test_nothing_is_decoded_if_decoding_is_off(content_type: str) -> None:
    assert inputs(b"[1]", content_type, decode=False) == {"body": bytearray(b"[1]")}


def test_query_pairs_are_inputs_in_addition_to_the_body() -> None:
    assert inputs(b"", query=b"data=a+b&n=&g=%C3%BC&raw=\xc3\xbc") == {
        "data": bytearray(b"a b"),
        "n": bytearray(),
        "g": bytearray("ü", "utf-8"),
        "raw": bytearray("ü", "utf-8"),
        "body": bytearray(),
    }


def test_the_body_overrides_a_query_pair_named_body() -> None:
    assert inputs(b"x", query=b"body=y") == {"body": bytearray(b"x")}


def test_form_fields_are_inputs() -> None:
    assert inputs(b"a=1&b=two+words&c=%00", "application/x-www-form-urlencoded") == {
        "a": bytearray(b"1"),
        "b": bytearray(b"two words"),
        "c": bytearray(b"\0"),
    }


@pytest.mark.parametrize(
    ("body", "kind", "query"),
    [
        (
            multipart((part_head("a"), b"1"), (part_head("b"), b"x"), (part_head("a"), b"2")),
            MULTIPART,
            b"",
        ),
        (b"a=1&b=x&a=2", FORM, b""),
        (b"", None, b"a=1&b=x&a=2"),
        (b"{}", "application/json", b"a=1&b=x&a=2"),
        (multipart((part_head("c"), b"")), MULTIPART, b"a=1&b=x&a=2"),
        (b"c=", FORM, b"a=1&b=x&a=2"),
    ],
)
def test_a_repeated_field_has_its_last_value_and_a_list_of_all(
    body: bytes, kind: str | None, query: bytes
) -> None:
    row = read(body, kind, query)
    assert (row.inputs["a"], row.inputs["b"]) == (b"2", b"x")
    assert row.parts == {"a": {"values": [b"1", b"2"]}}


def test_repeated_files_keep_their_types() -> None:
    part = part_head("data", 'filename="1"', "Content-Type: application/json")
    row = read(multipart((part, b"[1]"), (part, b"[2]")), MULTIPART)
    assert row == (
        {"data": [2]},
        {"data": {"content-type": "application/json", "values": [[1], [2]]}},
    )


def test_a_form_may_contain_any_bytes() -> None:
    assert inputs(
        b"data=%C3%A9+x&n\xc3\xa9m=1&raw=\xff\xfe", "application/x-www-form-urlencoded"
    ) == {
        "data": bytearray("é x".encode()),
        "ném": bytearray(b"1"),
        "raw": bytearray(b"\xff\xfe"),
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"instances": [[1, 2]]}', {"instances": [[1, 2]]}),
        (b' [1, {"b64": "a=&b;c"}]', [1, {"b64": "a=&b;c"}]),
        (b"5", 5),
        (b'{"instances": [1', bytearray(b'{"instances": [1')),
    ],
)
def test_json_with_the_content_type_of_a_form_is_the_body(body: bytes, expected: Any) -> None:
    """Use the content type that `curl -d` sends by default."""
    assert inputs(body, FORM, query=b"a=1") == {"a": bytearray(b"1"), "body": expected}
    assert inputs(body, FORM, decode=False) == {"body": bytearray(body)}


@pytest.mark.parametrize("name", ["[0].Name", "{name}", '{"a":', "[" * 5000])
def test_form_fields_whose_names_begin_like_json_remain_fields(name: str) -> None:
    body = f"{name}=x&b=2".encode()
    assert inputs(body, FORM) == {name: bytearray(b"x"), "b": bytearray(b"2")}


def test_multipart_fields_without_a_type_remain_bytes() -> None:
    row = read(multipart((part_head("data"), b"abc"), (part_head("more"), b"\r\n\0")), MULTIPART)
    assert row.inputs == {"data": bytearray(b"abc"), "more": bytearray(b"\r\n\0")}
    assert row.parts == {}


def test_a_part_is_decoded_by_its_own_content_type() -> None:
    body = multipart(
        (part_head("j", 'filename="a.json"', "Content-Type: application/json"), b'{"k": 1}'),
        (part_head("t", 'filename="a.txt"', "content-type: text/plain"), b"hello"),
        (part_head("i", 'filename="a.jpg"', "Content-Type: image/jpeg"), b"\xff\xd8"),
        (part_head("f", 'filename="a"'), b"x"),
    )
    row = read(body, MULTIPART)
    assert row.inputs == {
        "j": {"k": 1},
        "t": "hello",
        "i": bytearray(b"\xff\xd8"),
        "f": bytearray(b"x"),
    }
    assert row.parts == {
        "j": {"content-type": "application/json"},
        "t": {"content-type": "text/plain"},
        "i": {"content-type": "image/jpeg"},
        "f": {"content-type": "application/octet-stream"},
    }
    assert read(body, MULTIPART, decode=False).inputs["j"] == bytearray(b'{"k": 1}')


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (multipart((part_head("a"), b"1")), "multipart/form-data", "no boundary"),
        (multipart((part_head("a"), b"1"), has_end=False), MULTIPART, "incomplete"),
        (b"", MULTIPART, "not in it"),
        (b"nonsense", MULTIPART, "not in it"),
        (b"--xyy\r\n" + multipart((part_head("a"), b"1"))[7:], MULTIPART, "not in it"),
        (b"--xyz\r\nno header\r\n", MULTIPART, "incomplete"),
        (b"--xyz\r\nno header\r\n--xyz--", MULTIPART, "no name"),
        (multipart(("Content-Type: text/plain", b"1")), MULTIPART, "no name"),
        (
            multipart((part_head("a"), b"1")),
            f"multipart/form-data; boundary={'b' * 10_000}",
            "multipart",
        ),
    ],
)
def test_a_malformed_multipart_body_is_a_bad_request(
    body: bytes, content_type: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        read(body, content_type)


@given(st.binary(max_size=60))
def test_text_before_the_first_boundary_is_ignored(preamble: bytes) -> None:
    body = multipart((part_head("a"), b"1"))
    assert inputs(preamble.replace(b"--xyz", b"") + b"\r\n" + body, MULTIPART) == {
        "a": bytearray(b"1")
    }


def test_a_line_that_only_begins_with_the_boundary_is_ignored() -> None:
    for preamble in (b"see\r\n--xyzzy\r\n\r\n", b"--xyzzy\r\n"):
        assert inputs(preamble + multipart((part_head("a"), b"1")), MULTIPART) == {
            "a": bytearray(b"1")
        }


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.binary(max_size=200)),
        min_size=1,
        max_size=6,
    )
)
def test_multipart_fields_may_contain_any_bytes(fields: list[tuple[str, bytes]]) -> None:
    fields = [(name, value.replace(b"\r\n--xyz", b"")) for name, value in fields]
    assert inputs(multipart(*((part_head(name), value) for name, value in fields)), MULTIPART) == {
        name: bytearray(value) for name, value in fields
    }


@given(
    st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=80),
    st.binary(max_size=50),
)
def test_any_content_type_is_accepted(content_type: str, body: bytes) -> None:
    try:
        read(body, content_type)
    except BadRequest:
        assert "multipart" in content_type.lower() or INPUTS.decode() in content_type.lower()


@pytest.mark.parametrize("content_type", ["tensors", "TENSORS;4", "application/tensors"])
def test_the_content_type_of_tensors_is_ignored_in_a_client_request(content_type: str) -> None:
    assert inputs(b"ab", content_type) == {"body": bytearray(b"ab")}
