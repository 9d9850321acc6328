"""The model name in a form: the only field that the front end reads, with bounded effort."""

from __future__ import annotations

import pytest

from tsx_runtime.api.urls import MAX_FIELDS, field_counter, find_target, model_in_form
from tsx_runtime.errors import BadRequest, PayloadTooLarge

PAIRS = [(b"content-type", b"application/x-www-form-urlencoded")]
UNBOUNDED = [(b"content-type", b"multipart/form-data")]
MULTIPART = [(b"content-type", b'multipart/form-data; charset=utf-8; boundary="x y"')]


def form_part(disposition: str, value: bytes, extra_header: str = "") -> bytes:
    return (
        f"\r\n--x y\r\n{extra_header}Content-Disposition: form-data; {disposition}\r\n\r\n".encode()
        + value
    )


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b"model_name=digits", "digits"),
        (b"data=1&model_name=digits&more=2", "digits"),
        (b"data=1;model_name=digits", "digits"),
        (b"model_name=a&model_name=b", "b"),
        (b"model_name=", ""),
        (b"data=model_name", None),
        (b"", None),
        (b"a=1&" * (MAX_FIELDS - 1) + b"model_name=digits", "digits"),
    ],
)
def test_the_model_is_read_from_a_urlencoded_form(body, name):
    assert model_in_form(PAIRS, body) == name


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ([form_part('name="model_name"', b"digits")], "digits"),
        ([form_part("name=model_name", b"digits", "Content-Type: text/plain\r\n")], "digits"),
        (
            [
                form_part('name="data"; filename="a"', b"\r\n\r\n--x\r\n"),
                form_part('name="model_name"', b"digits"),
            ],
            "digits",
        ),
        ([form_part('name="model_name"; filename="a"', b"digits")], None),
        (
            [
                form_part(
                    'name="data"', b'Content-Disposition: form-data; name="model_name"\r\n\r\nx'
                )
            ],
            None,
        ),
        (
            [form_part('name="data"', b"")] * (MAX_FIELDS - 2)
            + [form_part('name="model_name"', b"digits")],
            "digits",
        ),
        ([form_part('name="model_name"', b"digits", "X-Long: " + "a" * 5000 + "\r\n")], None),
    ],
)
def test_the_model_is_read_from_a_multipart_form(parts, name):
    body = b"".join(parts).removeprefix(b"\r\n") + b"\r\n--x y--\r\n"
    assert model_in_form(MULTIPART, body) == name
    assert (
        model_in_form(MULTIPART, b"preamble" + b"".join(parts) + b"\r\n--x y--\r\nepilogue") == name
    )


@pytest.mark.parametrize(
    "content_type", [b"multipart/form-data", b"multipart/form-data; boundary=" + b'";' * 5000]
)
def test_a_form_without_a_valid_boundary_names_no_model(content_type):
    assert (
        model_in_form([(b"content-type", content_type)], form_part('name="model_name"', b"digits"))
        is None
    )


@pytest.mark.parametrize(
    ("headers", "body"),
    [(PAIRS, b"a&" * MAX_FIELDS), (MULTIPART, form_part('name="a"', b"") * (MAX_FIELDS + 1))],
)
def test_a_form_with_too_many_fields_is_refused(headers, body):
    with pytest.raises(PayloadTooLarge, match="more than 1000 fields"):
        model_in_form(headers, body)
    count = field_counter(headers)
    count(body[:-120])
    with pytest.raises(PayloadTooLarge, match="more than 1000 fields"):
        count(body[-120:] * 3)


@pytest.mark.parametrize(
    ("headers", "body"),
    [(PAIRS, b"a" * 100_000), (MULTIPART, b"\r\n--y" * 5000), (UNBOUNDED, b"\r\n--" * 5000)],
)
def test_one_form_field_may_be_large(headers, body):
    field_counter(headers)(body)
    assert model_in_form(headers, body) is None


def test_query_parameters_have_the_same_limit_as_form_fields():
    target = find_target("/invocations", b"a=1&" * (MAX_FIELDS - 1) + b"model_name=digits")
    assert target is not None
    assert target.name == "digits"
    with pytest.raises(BadRequest, match="1001 parameters"):
        find_target("/invocations", b"a=1&" * MAX_FIELDS + b"model_name=digits")
