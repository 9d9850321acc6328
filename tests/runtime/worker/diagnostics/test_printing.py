"""The output of handlers, labelled with the model's name and the ids of running requests."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.shared.log_format import MAX_IDS, UNSAFE
from tsx_runtime.worker.diagnostics.printing import (
    MAX_LINE_BYTES,
    ModelLabel,
    OutputFormatter,
    WorkerLog,
)

LABEL = ModelLabel("digits", "1.0", "9000")
PIECES = st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"c\r\n", b"\xff", b"d\ne"]), max_size=20)


def formatted(log_format, pieces, ids=("id-1", "id-2")):
    formatter = OutputFormatter("stdout", log_format, LABEL, lambda: list(ids))
    return b"".join(map(formatter, pieces))


def test_a_text_line_begins_with_the_model_and_the_request_ids() -> None:
    assert (
        formatted("text", [b"one\ntw", b"o\n"])
        == b"digits 1.0 id-1,id-2 | one\ndigits 1.0 id-1,id-2 | two\n"
    )
    assert formatted("text", [b"loading\n"], ()) == b"digits 1.0 | loading\n"


def test_a_line_of_a_large_batch_has_the_first_ids_and_a_count() -> None:
    line = formatted("text", [b"x\n"], [f"id-{number}" for number in range(MAX_IDS + 3)])
    assert line.endswith(b"id-63,+3 | x\n")


CONTROL_SEQUENCES = [
    b"\x1b]52;c;ZXZpbA==\x07",  # sets the clipboard
    b"\x1b]8;;http://evil.org\x1b\\click\x1b]8;;\x1b\\",
    b"\x1bc",  # resets the terminal
    b"\x1b[2J\x1b[1;1H",
    b"\xc2\x9b2J",  # CSI (control sequence introducer) as one character
    b"\x9b2J",
    b"a\x08\x08\x7f\x00\x0b\x0c",
    "\u202egnp.exe\u2066".encode(),
]


@pytest.mark.parametrize("text", CONTROL_SEQUENCES)
def test_no_output_of_a_handler_controls_a_terminal(text: bytes) -> None:
    pieces = [b"before ", text[:1], text[1:3], text[3:], b" after\n"]
    for log_format in ("text", "json"):
        out = formatted(log_format, pieces)
        assert not UNSAFE.search(out.decode())
        assert b"before" in out
        assert b"after" in out


def test_a_progress_bar_has_the_label_each_time_it_redraws() -> None:
    out = formatted("text", [b"\r10%", b"\r20%", b"\rother 2.0 | forged\n", b"done\r\n"], ())
    label = b"digits 1.0 | "
    bar = [b"", b"10%", b"20%", b"other 2.0 | forged\n"]
    assert out == b"\r".join(label + part for part in bar) + label + b"done\r\n"


@given(PIECES)
def test_all_output_is_kept_and_each_line_is_labelled(pieces) -> None:
    out = formatted("text", [*pieces, b"."])
    assert (
        out.replace(b"digits 1.0 id-1,id-2 | ", b"")
        == b"".join(pieces).replace(b"\xff", b"\\xff") + b"."
    )


@given(PIECES)
def test_each_complete_line_becomes_a_json_object(pieces) -> None:
    *lines, _ = b"".join(pieces).split(b"\n")
    entries = [json.loads(line) for line in formatted("json", pieces).splitlines()]
    assert [entry["message"] for entry in entries] == [
        line.rstrip(b"\r").decode(errors="replace") for line in lines
    ]
    label = {"model": "digits", "version": "1.0", "request_ids": ["id-1", "id-2"]}
    assert all(entry | label == entry for entry in entries)


def test_a_long_line_becomes_several_json_objects() -> None:
    lines = formatted("json", [b"a" * 150_000 + b"\nb\n"]).splitlines()
    lengths = [len(json.loads(line)["message"]) for line in lines]
    assert lengths == [MAX_LINE_BYTES, MAX_LINE_BYTES, 150_000 - 2 * MAX_LINE_BYTES, 1]


def test_a_log_line_begins_a_new_line_and_has_the_request_ids_once() -> None:
    formatter = OutputFormatter("stderr", "text", LABEL, lambda: ["id-1"])
    out = (
        formatter(b"10%")
        + formatter.format_record("it failed\n  handler.py:8", ["id-1"])
        + formatter(b"20%")
    )
    assert out.decode().splitlines() == [
        "digits 1.0 id-1 | 10%",
        "digits 1.0 id-1 | it failed",
        "digits 1.0 |   handler.py:8",
        "digits 1.0 id-1 | 20%",
    ]


def test_wrong_arguments_of_a_log_line_do_not_raise(capsys) -> None:
    record = logging.LogRecord("own", logging.WARNING, "", 0, "%d", ("no number",), None)
    WorkerLog("json", LABEL, list).handle(record)
    assert "TypeError" in capsys.readouterr().err
