"""What a handler prints and logs has the model's name and the ids of the requests that run, however it is printed."""

from __future__ import annotations

import json
import logging

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.loglines import MARK, MARK_END, MOST_IDS
from tsx_runtime.worker.printing import LONGEST, Dress, JsonLog, Whose

WHOSE = Whose("digits", "1.0", "9000")
PIECES = st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"c\r\n", b"\xff", b"d\ne"]), max_size=20)


def dressed(shape, pieces, ids=("id-1", "id-2")):
    dress = Dress("stdout", shape, WHOSE, lambda: list(ids))
    return b"".join(map(dress, pieces))


def test_a_line_for_a_person_begins_with_the_model_and_the_ids() -> None:
    assert dressed("text", [b"one\ntw", b"o\n"]) == b"digits 1.0 id-1,id-2 | one\ndigits 1.0 id-1,id-2 | two\n"
    assert dressed("text", [b"loading\n"], ()) == b"digits 1.0 | loading\n"


def test_of_a_large_batch_a_line_names_the_first_ids_and_counts_the_others() -> None:
    line = dressed("text", [b"x\n"], [f"id-{number}" for number in range(MOST_IDS + 3)])
    assert line.endswith(b"id-63,+3 | x\n")


@given(PIECES)
def test_each_whole_line_becomes_an_object(pieces) -> None:
    *lines, _ = b"".join(pieces).split(b"\n")
    told = [json.loads(line) for line in dressed("json", pieces).splitlines()]
    assert [line["message"] for line in told] == [line.rstrip(b"\r").decode(errors="replace") for line in lines]
    assert all((line["model"], line["version"], line["request_ids"]) == ("digits", "1.0", ["id-1", "id-2"]) for line in told)


def test_a_line_that_is_too_long_becomes_several_objects() -> None:
    told = [json.loads(line) for line in dressed("json", [b"a" * 150_000 + b"\nb\n"]).splitlines()]
    assert [len(line["message"]) for line in told] == [LONGEST, LONGEST, 150_000 - 2 * LONGEST, 1]


@given(PIECES)
def test_what_is_marked_is_what_was_printed_and_a_mark_before_each_line(pieces) -> None:
    mark = f"{MARK}id-1,id-2{MARK_END}".encode()
    whole = b"".join(pieces)
    marked = dressed("marked", pieces)
    assert marked.replace(mark, b"") == whole
    assert all(line.startswith(mark) for line in marked.split(b"\n") if line)
    assert dressed("marked", pieces, ()) == whole


def test_arguments_that_do_not_fit_the_words_of_a_line_are_no_error_of_who_logs_it(capsys) -> None:
    record = logging.LogRecord("own", logging.WARNING, "", 0, "%d", ("no number",), None)
    JsonLog(WHOSE, list).handle(record)
    assert "TypeError" in capsys.readouterr().err
