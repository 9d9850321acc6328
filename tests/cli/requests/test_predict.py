"""What `tsx predict` sends and how it lays out what comes back."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.conftest import Answering, Run
from tsx_cli.common.client import Response, Server
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.requests.predict import _form, _read, as_probabilities, describe, show
from tsx_runtime.shared.content_types import guess_content_type


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
def test_the_content_type_is_guessed_from_the_name_else_from_the_bytes(
    name: str, data: bytes, expected: str
) -> None:
    assert guess_content_type(name, data) == expected


def answer(body: bytes, content_type: str = "") -> Response:
    return Response(200, {"content-type": content_type}, iter([body]))


def laid_out(body: bytes, content_type: str = "") -> str:
    console = Console(file=io.StringIO(), width=80)
    show(answer(body, content_type), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_classifiers_answer_is_a_table_with_bars() -> None:
    assert (
        laid_out(b'{"cat": 0.5, "dog!": 0.25}')
        == f"cat    50.00%  {'█' * 15}\ndog!   25.00%  {'█' * 8}\n"
    )


def test_other_json_is_indented() -> None:
    assert laid_out(b'{"a":[1,"x"]}') == '{\n  "a": [\n    1,\n    "x"\n  ]\n}\n'


def test_text_is_printed_as_it_is_even_where_it_looks_like_markup() -> None:
    assert laid_out(b"[red]hi[/red]") == "[red]hi[/red]\n"
    assert laid_out(b"a stream", "text/plain") == "a stream\n"


def test_an_answer_does_not_steer_the_terminal() -> None:
    assert laid_out(b"\x1b[2Ja\r\nb", "text/plain") == "\\x1b[2Ja\r\nb\n"
    assert "\x1b" not in laid_out(b"\x1b[2J")
    assert laid_out('{"\x9bcat": 0.5}'.encode()).startswith(r"\x9bcat  ")
    shown = laid_out('{"a": ["\x9b31m", "\\u001b"]}'.encode())
    assert "\x9b" not in shown
    assert "\x1b" not in shown


def test_json_that_is_nested_too_deeply_is_text() -> None:
    body = b"[" * 100_000
    assert laid_out(body).replace("\n", "") == body.decode()
    assert describe(answer(body))["answer"] == body.decode()


def test_a_stream_of_text_may_part_a_character() -> None:
    console = Console(file=io.StringIO(), width=80)
    show(
        Response(200, {"content-type": "text/plain"}, iter(["é".encode()[:1], "é".encode()[1:]])),
        console,
    )
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "é\n"


def test_bytes_are_not_thrown_at_a_terminal() -> None:
    with pytest.raises(
        CliError,
        match="2 bytes of image/png",
    ):
        laid_out(b"\xff\xfe", "image/png")


@pytest.mark.parametrize(
    "value",
    [[], {}, {"a": 2.0}, {"a": 1}, {"a": True}, {str(n): 0.5 for n in range(21)}, "x", None],
)
def test_what_is_no_list_of_probabilities_is_left_alone(value: object) -> None:
    assert as_probabilities(value) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1}', {"answer": {"a": 1}}),
        (b"hello", {"answer": "hello"}),
        (b"\xff", {"base64": "/w=="}),
    ],
)
def test_for_programs_the_answer_is_json_or_text_or_base64(
    body: bytes, expected: dict[str, object]
) -> None:
    assert describe(answer(body)) == {"status": 200, "content_type": None, **expected}


def test_a_file_that_cannot_be_sent_is_named(run: Run) -> None:
    ended = run("predict", "m", "none.png")
    assert ended.err.startswith(
        "Error: the file 'none.png' cannot be read (No such file or directory)"
    )
    assert "echo none.png | tsx predict MODEL -" in ended.err
    assert "(Is a directory)" in run("predict", "m", ".").err
    assert run("predict", "m", "x", "--output", "y", "--json").code == 2


def test_a_word_is_a_file_or_else_a_text(tmp_path: Path) -> None:
    (tmp_path / "a file.txt").write_bytes(b"content")
    assert _read(str(tmp_path / "a file.txt")) == ("a file.txt", "text/plain", b"content")
    plain = "text/plain; charset=utf-8"
    for text, kind in (("a text.", plain), ('{"a": 1}', "application/json"), ("x " * 5000, plain)):
        assert _read(text) == ("-", kind, text.encode())


def test_a_form_has_its_fields_and_what_is_sent() -> None:
    sent = ("cat.png", b"png", "image/png")
    assert _form(["top=3", "data", "text=a=b"], sent) == [
        ("top", "3"),
        ("data", sent),
        ("text", "a=b"),
    ]
    assert _form(["empty="], None) == [("empty", "")]
    for fields, given in ((["top=3"], sent), (["data", "more"], sent), (["data"], None)):
        with pytest.raises(UsageError, match="--field takes NAME=VALUE"):
            _form(fields, given)


@pytest.mark.parametrize(
    ("kind", "body", "written"),
    [
        ("text/plain", b"hello", b"hello\n"),
        ("text/plain", b"hello\n", b"hello\n"),
        ("application/json", b"{}", b"{}\n"),
        ("application/octet-stream", b"hello", b"hello"),
        ("text/plain", b"", b""),
    ],
)
def test_a_text_that_is_printed_ends_a_line_and_other_bytes_stay(
    run: Run, answering: Answering, tmp_path: Path, kind: str, body: bytes, written: bytes
) -> None:
    url = answering(200, body, **{"content-type": kind})
    assert run("predict", "m", "a text", "--url", url).out.encode() == written
    assert run("predict", "m", "a text", "--url", url, "-o", "answer").out == ""
    assert (tmp_path / "answer").read_bytes() == body


def test_the_input_may_be_named_by_an_option_as_in_bench(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bodies = []

    def call(server: Server, method: str, path: str, body: bytes, headers: object) -> Response:
        bodies.append(body)
        return answer(b"ok")

    monkeypatch.setattr(Server, "call", call)
    (tmp_path / "a.txt").write_bytes(b"content")
    assert run("predict", "m", "--input", "a.txt").code == 0
    assert bodies == [b"content"]
    for words in (("a.txt", "--input", "a.txt"), ("--sample", "--input", "a.txt"), ()):
        ended = run("predict", "m", *words)
        assert (ended.code, "give one file or text, or --sample" in ended.err) == (2, True)


def test_text_on_a_terminal_ends_with_one_newline() -> None:
    assert laid_out(b"hello\n", "text/plain") == "hello\n"


def test_a_token_is_sent(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = []

    def call(server: Server, *request: object) -> Response:
        tokens.append(server.authorization["Authorization"])
        return answer(b"ok")

    monkeypatch.setattr(Server, "call", call)
    (tmp_path / "token").write_text("other\n")
    monkeypatch.setenv("TSX_INFERENCE_TOKEN", "setting")
    for words in ((), ("--token", "given"), ("--token", "@token")):
        assert run("predict", "m", "a text", *words).code == 0
    assert tokens == ["Bearer setting", "Bearer given", "Bearer other"]
