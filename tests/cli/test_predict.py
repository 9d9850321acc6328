"""The requests of `tsx predict` and its output."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.conftest import Answering, Run
from tests.support.models import make_model
from tests.support.typed_models import SIGNATURE, TYPED
from tsx_cli.common.client import Response, Server
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.predict.command import _form, _read, as_probabilities, describe, show
from tsx_cli.predict.typed_fields import encode_fields
from tsx_runtime.shared.content_types import guess_content_type
from tsx_runtime.testing import serve


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("cat.jpg", b"", "image/jpeg"),
        ("cat.PNG", b"", "image/png"),
        ("rows.json", b"not json", "application/json"),
        ("-", b'{"a": 1}', "application/json"),
        ("-", b"hello", "text/plain; charset=utf-8"),
        ("-", b"\xff\x00", "application/octet-stream"),
        ("x.tar.gz", b"\x1f\x8b", "application/octet-stream"),
    ],
)
def test_the_content_type_is_guessed_from_name_or_content(
    name: str, data: bytes, expected: str
) -> None:
    assert guess_content_type(name, data) == expected


def answer(*pieces: bytes, content_type: str = "") -> Response:
    return Response(200, {"content-type": content_type}, iter(pieces))


def shown(*pieces: bytes, content_type: str = "") -> str:
    """Return what a terminal of 80 columns shows of a response."""
    file = io.StringIO()
    show(answer(*pieces, content_type=content_type), Console(file=file, width=80))
    return file.getvalue()


def test_a_classifiers_response_is_a_table_with_bars() -> None:
    table = f"cat    50.00%  {'█' * 15}\ndog!   25.00%  {'█' * 8}\n"
    assert shown(b'{"cat": 0.5, "dog!": 0.25}') == table


def test_other_json_is_indented() -> None:
    assert shown(b'{"a":[1,"x"]}') == '{\n  "a": [\n    1,\n    "x"\n  ]\n}\n'


def test_text_is_not_markup_and_ends_with_one_newline() -> None:
    assert shown(b"[red]hi[/red]") == "[red]hi[/red]\n"
    for text in (b"hello", b"hello\n"):
        assert shown(text, content_type="text/plain") == "hello\n"


def test_control_characters_of_a_response_are_escaped() -> None:
    assert shown(b"\x1b[2Ja\r\nb", content_type="text/plain") == "\\x1b[2Ja\r\nb\n"
    assert "\x1b" not in shown(b"\x1b[2J")
    assert shown('{"\x9bcat": 0.5}'.encode()).startswith(r"\x9bcat  ")
    text = shown('{"a": ["\x9b31m", "\\u001b"]}'.encode())
    assert "\x9b" not in text
    assert "\x1b" not in text


def test_deeply_nested_json_is_shown_as_text() -> None:
    body = b"[" * 100_000
    assert shown(body).replace("\n", "") == body.decode()
    assert describe(answer(body))["answer"] == body.decode()


def test_a_character_may_be_split_between_chunks() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert shown(first, second, content_type="text/plain") == "é\n"


def test_bytes_are_not_written_to_a_terminal() -> None:
    with pytest.raises(CliError, match="2 bytes of image/png"):
        shown(b"\xff\xfe", content_type="image/png")


@pytest.mark.parametrize(
    "value",
    [[], {}, {"a": 2.0}, {"a": 1}, {"a": True}, {str(n): 0.5 for n in range(21)}, "x", None],
)
def test_other_values_are_not_shown_as_probabilities(value: object) -> None:
    assert as_probabilities(value) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1}', {"answer": {"a": 1}}),
        (b"hello", {"answer": "hello"}),
        (b"\xff", {"base64": "/w=="}),
    ],
)
def test_json_output_has_the_response_as_json_text_or_base64(
    body: bytes, expected: dict[str, object]
) -> None:
    assert describe(answer(body)) == {"status": 200, "content_type": None, **expected}


def test_the_error_of_an_unreadable_file_names_it(run: Run) -> None:
    result = run("predict m none.png")
    assert "'none.png' cannot be read (No such file or directory)" in result.err
    assert "echo none.png | tsx predict MODEL -" in result.err
    assert "(Is a directory)" in run("predict m .").err
    assert run("predict m x --output y --json").code == 2


def test_an_argument_is_a_file_or_text(tmp_path: Path) -> None:
    (tmp_path / "a file.txt").write_bytes(b"content")
    assert _read(str(tmp_path / "a file.txt")) == ("a file.txt", "text/plain", b"content")
    plain = "text/plain; charset=utf-8"
    for text, kind in (("a text.", plain), ('{"a": 1}', "application/json"), ("x " * 5000, plain)):
        assert _read(text) == ("-", kind, text.encode())


def test_a_form_contains_its_fields_and_the_input() -> None:
    file = ("cat.png", b"png", "image/png")
    assert _form(["top=3", "data", "text=a=b"], file) == [
        ("top", "3"),
        ("data", file),
        ("text", "a=b"),
    ]
    assert _form(["empty="], None) == [("empty", "")]
    for fields, value in ((["top=3"], file), (["data", "more"], file), (["data"], None)):
        with pytest.raises(UsageError, match="--field takes NAME=VALUE"):
            _form(fields, value)


SCHEMA = {
    "$ref": "#/$defs/Text",
    "$defs": {
        "Text": {
            "properties": {
                "text": {"type": "string"},
                "top": {"type": "integer"},
                "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "note": {"anyOf": [{"$ref": "#/$defs/Note"}, {"type": "integer"}]},
                "tags": {"type": "array"},
                "any": {},
            }
        },
        "Note": {"enum": ["1", "2"]},
    },
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text=1", "1"),
        ("text=a=b", "a=b"),
        ("text=", ""),
        ("top=3", 3),
        ("top=three", "three"),
        ("exact=true", True),
        ("exact=null", None),
        ("note=1", "1"),
        ('tags=[{"a": 1}]', [{"a": 1}]),
        ("any=0.5", 0.5),
    ],
)
def test_fields_have_the_types_of_the_models_schema(field: str, value: object) -> None:
    body = encode_fields([field], SCHEMA)
    assert body is not None
    assert json.loads(body) == {field.partition("=")[0]: value}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["txt=a"], "no field 'txt'; did you mean 'text'? it has text, top"),
        (["zzz=a"], "no field 'zzz'; it has text, top"),
        (["text"], "--field text has no value"),
        (["top=1", "top=2"], "--field top is given twice"),
    ],
)
def test_fields_that_the_model_does_not_have_are_refused(fields: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        encode_fields(fields, SCHEMA)


def test_other_fields_are_sent_if_the_schema_allows_them() -> None:
    schema = {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert encode_fields(["b=1"], schema) == b'{"b": 1}'
    assert encode_fields(["b=1"], {"type": "object", "additionalProperties": {}}) is None


@pytest.mark.usefixtures("processes")
def test_a_model_with_a_signature_gets_json_and_its_422_is_shown_by_field(
    run: Run, tmp_path: Path
) -> None:
    archive = make_model(tmp_path / "sentiment.mar", TYPED)
    with serve(archive, worker_preload=False) as server:
        arguments = f"predict sentiment --url {server.url}"
        result = run(f"{arguments} --field text=nice --field top=2 --field tags='[]'")
        assert json.loads(result.out)["given"] == {"text": "nice", "top": 2, "tags": []}
        result = run(f"{arguments} --version 1.0 --field top=two")
        problem = "top: Input should be a valid integer; text: Field required"
        assert (result.code, result.out, problem in result.err) == (1, "", True)
        assert json.loads(run(f"{arguments} --sample").out)["given"] == SIGNATURE["example"]
        result = run(f"{arguments} --field txt=nice")
        assert (result.code, "did you mean 'text'?" in result.err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("text/plain", b"hello", b"hello\n"),
        ("text/plain", b"hello\n", b"hello\n"),
        ("application/json", b"{}", b"{}\n"),
        ("application/octet-stream", b"hello", b"hello"),
        ("text/plain", b"", b""),
    ],
)
def test_printed_text_ends_with_a_newline_and_other_bytes_are_unchanged(
    run: Run, answering: Answering, tmp_path: Path, kind: str, body: bytes, expected: bytes
) -> None:
    url = answering(200, body, **{"content-type": kind})
    arguments = f"predict m 'a text' --url {url}"
    assert run(arguments).out.encode() == expected
    assert run(f"{arguments} -o answer").out == ""
    assert (tmp_path / "answer").read_bytes() == body


def test_the_input_may_be_given_by_an_option(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bodies = []

    def call(server: Server, method: str, path: str, body: bytes, headers: object) -> Response:
        bodies.append(body)
        return answer(b"ok")

    monkeypatch.setattr(Server, "call", call)
    (tmp_path / "a.txt").write_bytes(b"content")
    assert run("predict m --input a.txt").code == 0
    assert bodies == [b"content"]
    for arguments in ("a.txt --input a.txt", "--sample --input a.txt", ""):
        result = run(f"predict m {arguments}")
        assert (result.code, "give one file or text, or --sample" in result.err) == (2, True)


def test_a_token_is_sent(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = []

    def call(server: Server, *request: object) -> Response:
        tokens.append(server.authorization["Authorization"])
        return answer(b"ok")

    monkeypatch.setattr(Server, "call", call)
    (tmp_path / "token").write_text("other\n")
    monkeypatch.setenv("TSX_INFERENCE_TOKEN", "setting")
    for arguments in ("", "--token given", "--token @token"):
        assert run(f"predict m 'a text' {arguments}").code == 0
    assert tokens == ["Bearer setting", "Bearer given", "Bearer other"]
