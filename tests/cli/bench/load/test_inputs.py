"""The inputs of a load: files, directories, lists, recordings, samples and generated inputs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.models import make_model
from tsx_archiver import inspect_archive
from tsx_cli.bench.commands.session import size_limits_of
from tsx_cli.bench.load.inputs import (
    KINDS,
    choose_payloads,
    generate_payloads,
    kind_of,
    parse_shape,
)
from tsx_cli.bench.load.payloads import MAX_PAYLOAD_BYTES, Payload, mix, read_payloads
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.recordings import Recorded, encode, file_head
from tsx_runtime.settings.schema import Settings

HANDLER = "def handle(data, context):\n    return [b'' for _ in data or []]\n"


def test_files_and_directories_are_sent_unchanged(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.json").write_text("[1]")
    (tmp_path / "in" / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "in" / ".hidden").write_text("no")
    (tmp_path / "c").write_bytes(b"\xff")
    payloads = read_payloads([tmp_path / "in", tmp_path / "c"])
    assert payloads == [
        Payload(b"\x89PNG", "image/png", name="a.png"),
        Payload(b"[1]", "application/json", name="b.json"),
        Payload(b"\xff", "application/octet-stream", name="c"),
    ]
    assert {
        payload.content_type for payload in read_payloads([tmp_path / "in"], content_type="a/b")
    } == {"a/b"}
    summary = mix(payloads, "somewhere")
    assert (summary.count, summary.smallest, summary.median, summary.largest) == (3, 1, 3, 4)
    assert summary.content_types == {
        "image/png": 1,
        "application/json": 1,
        "application/octet-stream": 1,
    }


def test_a_list_has_one_request_per_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    lines = [
        {"body": {"x": "ä"}},
        {"body": "words", "headers": {"X-Own": 1}, "query": "a=1"},
        {"base64": "/9g=", "content_type": "image/jpeg"},
        {"file": "x.txt"},
    ]
    (tmp_path / "list.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert read_payloads([tmp_path / "list.jsonl"]) == [
        Payload('{"x":"ä"}'.encode(), "application/json"),
        Payload(b"words", "text/plain; charset=utf-8", (("X-Own", "1"),), "a=1"),
        Payload(b"\xff\xd8", "image/jpeg"),
        Payload(b"text", "text/plain", name="x.txt"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ("[]", "a request is an object"),
        ("{}", "has one of body, file, base64, this one has none"),
        ('{"body": 1, "file": "x"}', "this one has body and file"),
        ('{"body": 1, "boddy": 2}', "'boddy' is not known"),
        ('{"base64": "*"}', "'base64' is not base64"),
        ('{"file": 3}', "'file' is text"),
        ('{"file": "gone"}', "there is no file"),
        ('{"body": 1, "headers": []}', "headers an object"),
        ('{"body": 1, "headers": {"Host": "h"}}', "the header Host"),
        ('{"body": 1, "headers": {"a": "b\\r\\nc: d"}}', "the header 'a' cannot be sent"),
        ('{"body": 1, "headers": {"a b": "c"}}', "the header 'a b' cannot be sent"),
        ('{"body": 1, "headers": {"": "c"}}', "the header '' cannot be sent"),
        (
            '{"body": 1, "headers": {"Content-Type": "a/b"}}',
            "give the Content-Type as 'content_type', not in the headers",
        ),
        ('{"body": 1, "content_type": "a\\r\\nc: d"}', "the header 'content-type' cannot be sent"),
        ('{"body": "\\ud800"}', "surrogates not allowed"),
        ('{"body": ' + 100_000 * "[", "recursion"),
    ],
)
def test_a_mistake_in_a_list_is_reported_with_its_line(
    tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "list.jsonl").write_text('{"body": 1}\n' + line)
    with pytest.raises(CliError, match="line 2") as error:
        read_payloads([tmp_path / "list.jsonl"])
    assert message in str(error.value)


def test_a_list_may_have_a_byte_order_mark_but_must_be_utf_8(
    tmp_path: Path,
) -> None:
    (tmp_path / "list.jsonl").write_bytes(b'\xef\xbb\xbf{"body": 1, "query": "n=\xc3\xa9"}\r\n')
    assert read_payloads([tmp_path / "list.jsonl"]) == [
        Payload(b"1", "application/json", query="n=\xc3\xa9")
    ]
    (tmp_path / "list.jsonl").write_bytes(b'{"body": 1}\n\xff\xfe\n')
    with pytest.raises(CliError, match="line 2"):
        read_payloads([tmp_path / "list.jsonl"])


def test_a_too_large_input_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        # The file is sparse, so it takes no disk space.
        file.truncate(MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(CliError, match="the limit for one input"):
        read_payloads([tmp_path / "large"])


def test_the_request_limit_is_raised_for_large_inputs() -> None:
    settings = Settings.model_validate({"max_request_size": 100, "max_response_size": 200})
    assert size_limits_of(settings, [Payload(b"x")]) == {
        "max_request_size": 100,
        "max_response_size": 200,
    }
    assert size_limits_of(settings, [Payload(b"x"), Payload(bytes(101))])["max_request_size"] == 101


def test_a_recording_keeps_times_and_headers_except_secrets(tmp_path: Path) -> None:
    headers = (
        ("Content-Type", "a/b"),
        ("X-Own", "o"),
        ("Authorization", "Bearer x"),
        ("content-length", "1"),
    )
    entries = [Recorded(10.0 + seconds, "1.0", "q=1", headers, b"x") for seconds in (0.0, 0.25)]
    (tmp_path / "a.tsxrec").write_bytes(file_head("m") + b"".join(map(encode, entries)))
    payloads = read_payloads([tmp_path / "a.tsxrec"])
    assert payloads == read_payloads([tmp_path])
    assert payloads == [
        Payload(b"x", "a/b", (("X-Own", "o"),), "q=1", seconds) for seconds in (0.0, 0.25)
    ]


def test_invalid_inputs_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.tsxrec").write_bytes(b"PK")
    (tmp_path / "none.jsonl").write_text("\n")
    for name, message in (
        ("gone", "there is no input"),
        ("empty", "contains no file"),
        ("bad.tsxrec", "not a recording"),
        ("none.jsonl", "no request"),
    ):
        with pytest.raises(CliError, match=message):
            read_payloads([tmp_path / name])
    with pytest.raises(UsageError, match="--input"):
        read_payloads([])


@pytest.mark.slow
def test_generated_images_have_the_given_shape_and_a_realistic_size() -> None:
    for kind, form, shape, mode in (
        ("image", "JPEG", (3, 48, 64), "RGB"),
        ("png", "PNG", (1, 48, 64), "L"),
        ("png", "PNG", (48, 64), "RGB"),
    ):
        payloads = generate_payloads(kind, 3, 1, shape)
        assert {payload.content_type for payload in payloads} == {f"image/{form.lower()}"}
        for payload in payloads:
            image = Image.open(io.BytesIO(payload.body))
            image.load()
            assert (image.format, image.size, image.mode) == (form, (64, 48), mode)
        assert len({payload.body for payload in payloads}) == 3
    large = generate_payloads("image", 1)[0].body
    assert 20_000 < len(large) < 400_000


@pytest.mark.slow
def test_generated_texts_numbers_and_files_have_the_given_size() -> None:
    assert all(8 <= len(payload.body.split()) <= 60 for payload in generate_payloads("text", 5))
    assert len(generate_payloads("text", 1, shape=(7,))[0].body.split()) == 7
    rows = json.loads(generate_payloads("json", 2, 3, (2, 3))[1].body)
    assert [len(row) for row in rows] == [3, 3]
    assert len(generate_payloads("file", 1, shape=(1000,))[0].body) == 1000
    # Fewer inputs are generated if they are large.
    assert len(generate_payloads("file", shape=(1 << 25,))) == 2
    for kind in KINDS:
        assert (
            generate_payloads(kind, 2, 7, (3, 8, 8))
            == generate_payloads(kind, 2, 7, (3, 8, 8))
            != generate_payloads(kind, 2, 8, (3, 8, 8))
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generate_payloads("sound"), "'sound' is unknown"),
        (lambda: generate_payloads("json"), "--input-kind json needs the shape"),
        (lambda: generate_payloads("image", shape=(5, 4, 4)), "with 1 or 3 channels"),
        (lambda: generate_payloads("json", shape=(1 << 20, 1 << 20)), "all together"),
        (lambda: generate_payloads("json", shape=(1 << 23,)), "all together"),
        (lambda: choose_payloads(None, kind="text", content_type="a\r\nb: c"), "--content-type"),
        (lambda: parse_shape("1,x"), "'1,x' is not a shape"),
        (lambda: parse_shape("0"), "is not a shape"),
        (lambda: choose_payloads(None), "--input FILE"),
        (lambda: choose_payloads(None, [Path("a")], kind="text"), "give only one of them"),
    ],
)
def test_inputs_that_cannot_be_generated_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert message in str(error.value)
    assert parse_shape("1x28,28") == (1, 28, 28)


def test_samples_take_precedence_over_warm_up_requests_and_generated_inputs(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", HANDLER, config="warmup:\n  - file: warm.json\n")
    (model / "warm.json").write_text("[1]")
    assert choose_payloads(model) == (
        [Payload(b"[1]", "application/json")],
        "the warm-up requests of the archive",
    )
    (model / "samples").mkdir()
    for name in ("b.json", "a.txt", ".c"):
        (model / "samples" / name).write_text("[2]")
    assert choose_payloads(model) == (
        [Payload(b"[2]", "text/plain"), Payload(b"[2]", "application/json")],
        "samples/ of the archive",
    )
    payloads, source = choose_payloads(model, kind="text", count=2)
    assert (len(payloads), source) == (2, "generated: 2 different text requests")
    assert choose_payloads(model, shape=(2,), count=1)[0][0].content_type == "application/json"
    (tmp_path / "x").write_text("x")
    assert choose_payloads(model, [tmp_path / "x"]) == (
        [Payload(b"x", "text/plain; charset=utf-8", name="x")],
        "x",
    )
    with pytest.raises(UsageError, match="has no samples"):
        choose_payloads(make_model(tmp_path / "own.mar", HANDLER))
    (tmp_path / "i" / "MAR-INF").mkdir(parents=True)
    manifest = {
        "runtime": "python",
        "model": {"modelName": "i", "modelVersion": "1", "handler": "image_classifier"},
    }
    (tmp_path / "i" / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    assert choose_payloads(tmp_path / "i", count=1)[0][0].content_type == "image/jpeg"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("class Own:\n    input_kind = 'text'\n", "text"),
        ("class Own(ImageClassifier):\n    pass\n", "image"),
        ("class Own(handlers.TextClassifier):\n    input_kind = 'json'\n", "json"),
        ("class Own(BaseHandler):\n    input_kind = 'music'\n", None),
        ("no Python", None),
    ],
)
def test_the_input_kind_of_a_handler_is_read_from_its_source_code(
    tmp_path: Path, code: str, kind: str | None
) -> None:
    assert kind_of(inspect_archive(make_model(tmp_path / "m.mar", code))) == kind
