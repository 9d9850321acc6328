"""What a handler prints and logs has the model's name and the ids of the requests that run, however
it is printed.
"""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.shared.log_format import MAX_IDS, UNSAFE
from tsx_runtime.worker.diagnostics.printing import LONGEST, ModelLabel, OutputFormatter, WorkerLog

WHOSE = ModelLabel("digits", "1.0", "9000")
PIECES = st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"c\r\n", b"\xff", b"d\ne"]), max_size=20)


def formatted(shape, pieces, ids=("id-1", "id-2")):
    dress = OutputFormatter("stdout", shape, WHOSE, lambda: list(ids))
    return b"".join(map(dress, pieces))


def test_a_line_for_a_person_begins_with_the_model_and_the_ids() -> None:
    assert (
        formatted("text", [b"one\ntw", b"o\n"])
        == b"digits 1.0 id-1,id-2 | one\ndigits 1.0 id-1,id-2 | two\n"
    )
    assert formatted("text", [b"loading\n"], ()) == b"digits 1.0 | loading\n"


def test_of_a_large_batch_a_line_names_the_first_ids_and_counts_the_others() -> None:
    line = formatted("text", [b"x\n"], [f"id-{number}" for number in range(MAX_IDS + 3)])
    assert line.endswith(b"id-63,+3 | x\n")


STEERING = [
    b"\x1b]52;c;ZXZpbA==\x07",  # writes the clipboard
    b"\x1b]8;;http://evil.org\x1b\\click\x1b]8;;\x1b\\",
    b"\x1bc",  # resets the terminal
    b"\x1b[2J\x1b[1;1H",
    b"\xc2\x9b2J",  # CSI as one character
    b"\x9b2J",
    b"a\x08\x08\x7f\x00\x0b\x0c",
    "\u202egnp.exe\u2066".encode(),
]


@pytest.mark.parametrize("text", STEERING)
def test_nothing_that_a_handler_prints_steers_a_terminal(text: bytes) -> None:
    pieces = [b"before ", text[:1], text[1:3], text[3:], b" after\n"]
    for shape in ("text", "json"):
        out = formatted(shape, pieces)
        assert not UNSAFE.search(out.decode())
        assert b"before" in out
        assert b"after" in out


def test_a_progress_bar_writes_over_its_own_line_and_cannot_hide_whose_it_is() -> None:
    out = formatted("text", [b"\r10%", b"\r20%", b"\rother 2.0 | forged\n", b"done\r\n"], ())
    assert (
        out
        == b"digits 1.0 | \rdigits 1.0 | 10%\rdigits 1.0 | 20%\rdigits 1.0 | other 2.0 | forged\ndigits 1.0 | done\r\n"
    )


@given(PIECES)
def test_as_text_nothing_is_lost_and_each_line_says_whose_it_is(pieces) -> None:
    out = formatted("text", [*pieces, b"."])
    assert (
        out.replace(b"digits 1.0 id-1,id-2 | ", b"")
        == b"".join(pieces).replace(b"\xff", b"\\xff") + b"."
    )


@given(PIECES)
def test_each_whole_line_becomes_an_object(pieces) -> None:
    *lines, _ = b"".join(pieces).split(b"\n")
    reported = [json.loads(line) for line in formatted("json", pieces).splitlines()]
    assert [line["message"] for line in reported] == [
        line.rstrip(b"\r").decode(errors="replace") for line in lines
    ]
    assert all(
        (line["model"], line["version"], line["request_ids"]) == ("digits", "1.0", ["id-1", "id-2"])
        for line in reported
    )


def test_a_line_that_is_too_long_becomes_several_objects() -> None:
    reported = [
        json.loads(line) for line in formatted("json", [b"a" * 150_000 + b"\nb\n"]).splitlines()
    ]
    assert [len(line["message"]) for line in reported] == [
        LONGEST,
        LONGEST,
        150_000 - 2 * LONGEST,
        1,
    ]


def test_a_line_of_the_log_at_a_terminal_begins_on_a_line_of_its_own_and_names_its_requests_once() -> (
    None
):
    dress = OutputFormatter("stderr", "text", WHOSE, lambda: ["id-1"])
    out = dress(b"10%") + dress.whole_lines("it failed\n  handler.py:8", ["id-1"]) + dress(b"20%")
    assert out.decode().splitlines() == [
        "digits 1.0 id-1 | 10%",
        "digits 1.0 id-1 | it failed",
        "digits 1.0 |   handler.py:8",
        "digits 1.0 id-1 | 20%",
    ]


def test_arguments_that_do_not_fit_the_words_of_a_line_are_no_error_of_who_logs_it(capsys) -> None:
    record = logging.LogRecord("own", logging.WARNING, "", 0, "%d", ("no number",), None)
    WorkerLog("json", WHOSE, list).handle(record)
    assert "TypeError" in capsys.readouterr().err
