"""Batches: each request is answered once, in order, with its own answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.served_model import a_served_model, answers_of
from tsx_runtime.wire import Item, request_meta
from tsx_runtime.worker.exceptions import BadRows
from tsx_runtime.worker.execution.batch import answer_batch, send_nowhere
from tsx_runtime.worker.handler_api.context import Context

STATUS = {
    "good": 200,
    "bad row": 400,
    "broken form": 400,
    "unsendable": 500,
    "half a character": 500,
    "raises when it is sent": 500,
    "too long": 500,
    "own status": 218,
    "no status": 500,
    "no header": 500,
}
KINDS = list(STATUS)
BROKEN_FORM = [(b"content-type", b"multipart/form-data; boundary=x")]


class Raises(dict[str, int]):
    """A lazy mapping whose source is closed."""

    def items(self) -> Any:
        raise KeyError("gone")


def handler(data: Any, context: Context) -> list[Any]:
    kinds = [bytes(row["body"]).decode().split("/")[0] for row in data]
    if errors := {
        idx: f"{context.get_request_id(idx)} is bad"
        for idx, kind in enumerate(kinds)
        if kind == "bad row"
    }:
        raise BadRows(errors)
    results: list[Any] = []
    for idx, kind in enumerate(kinds):
        if kind == "own status":
            context.set_response_status(218, idx=idx)
            context.set_response_header(idx, "X-Id", context.get_request_id(idx))
        if kind == "no status":
            context.request_processor[idx]._status_code = -1
        if kind == "no header":
            context.get_response_headers(idx)["X-Price"] = "5 €"
        results.append(
            {
                "unsendable": {1},
                "half a character": "\ud800",
                "too long": "x" * 101,
                "raises when it is sent": Raises(a=1),
            }.get(kind, context.get_request_id(idx))
        )
    return results


def items(kinds: list[str]) -> list[Item]:
    return [
        (
            0,
            request_meta(f"id-{number}", b"", BROKEN_FORM if kind == "broken form" else []),
            f"{kind}/{number}".encode(),
        )
        for number, kind in enumerate(kinds)
    ]


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12))
def test_each_request_gets_its_own_answer(kinds: list[str]) -> None:
    model = a_served_model(handler, max_response_size=100)
    answers = answer_batch(model, items(kinds), send_nowhere).answers
    assert [status for status, _, _ in answers] == [STATUS[kind] for kind in kinds]
    for number, (kind, (_, headers, body)) in enumerate(zip(kinds, answers, strict=True)):
        if kind in ("good", "own status"):
            assert bytes(body) == f"id-{number}".encode()
        elif kind == "bad row":
            assert json.loads(bytes(body))["message"] == f"id-{number} is bad"
        if kind == "own status":
            assert bytes(headers) == f"X-Id: id-{number}\r\n".encode()


@given(st.lists(st.sampled_from(KINDS[:3]), min_size=1, max_size=8), st.integers(0, 8))
def test_only_requests_without_sent_pieces_are_retried(kinds: list[str], index: int) -> None:
    def streaming(data: Any, context: Context) -> list[Any]:
        context.send_piece(min(index, len(data) - 1), b"part")
        return handler(data, context)

    pieces: list[int] = []
    model = a_served_model(streaming, max_response_size=100)
    answers = answer_batch(
        model, items(kinds), lambda position, headers, body: pieces.append(position)
    ).answers
    failed_request = pieces[:1] if "bad row" in kinds else []
    assert [status for status, _, _ in answers] == [
        400 if kind != "good" or number in failed_request else 200
        for number, kind in enumerate(kinds)
    ]
    assert len(set(pieces)) == len(pieces)


def test_a_handler_may_empty_its_list_of_rows() -> None:
    def takes_rows(data: Any, context: Context) -> list[Any]:
        return [data.pop(0)["body"] for _ in range(len(data))]

    def loses_rows(data: Any, context: Context) -> list[Any]:
        data.clear()
        return []

    popped_answers, missing_answers = (
        answers_of(a_served_model(handle), b"0", b"1") for handle in (takes_rows, loses_rows)
    )
    assert popped_answers == [(200, b"", b"0"), (200, b"", b"1")]
    assert [status for status, _, _ in missing_answers] == [500] * 2
    assert all(b"expect: 2, got: 0" in body for _, _, body in missing_answers)


def test_the_explain_header_is_recognized_in_any_case() -> None:
    batches: list[list[str]] = []

    def notes(data: Any, context: Context) -> list[Any]:
        batches.append(
            [str(context.get_request_header(idx, "explain")) for idx in range(len(data))]
        )
        return [""] * len(data)

    headers = [b"X-A: 1", b"Explain: True", b"X-Cached: True", b"explain: False", b"describe: True"]
    batch = [
        (0, request_meta(f"id-{idx}", b"", [tuple(header.split(b": "))]), b"")
        for idx, header in enumerate(headers)
    ]
    answers = answer_batch(a_served_model(notes), batch, send_nowhere).answers
    assert [status for status, _, _ in answers] == [200] * 5
    assert batches == [["None", "None", "False"], ["True"], ["None"]]


def test_a_request_that_cannot_be_read_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(text: str) -> Any:
        raise ZeroDivisionError("nobody thought of that")

    monkeypatch.setattr(json, "loads", loads)
    first, _, last = items(["good"] * 3)
    bad_item = (0, request_meta("id-1", b"", [(b"Content-Type", b"application/json")]), b"{}")
    answers = answer_batch(a_served_model(handler), [first, bad_item, last], send_nowhere).answers
    monkeypatch.undo()
    assert [status for status, _, _ in answers] == [200, 500, 200]


JSON, FORM = "application/json", "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("content_type", "body", "status", "reason"),
    [
        (JSON, b'{"a": [1, 2', 400, "column 12 (char 11). Prediction failed: TypeError"),
        (JSON, b'{"a": "\xff"}', 400, "can't decode byte 0xff in position 7"),
        (FORM, b'{"a": [1, 2', 400, "not valid JSON: "),
        (None, b'{"a": [1, 2]}', 500, "send -H 'Content-Type: application/json'"),
        (None, b"\x89PNG", 500, "Prediction failed: TypeError: no input"),
        (JSON, b'{"a": [1, 2]}', 500, "Prediction failed: TypeError: no input"),
        ("text/plain", b'{"a', 500, "Prediction failed: TypeError: no input"),
    ],
)
def test_a_body_that_is_not_json_is_not_reported_as_the_handlers_error(
    content_type: str | None,
    body: bytes,
    status: int,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(data: Any, context: Context) -> list[Any]:
        if data[0]["body"] == {}:
            return ["good"] * len(data)
        raise TypeError("no input")

    model = a_served_model(fails)
    headers = [(b"content-type", content_type.encode())] if content_type else []
    bad_item = (0, request_meta("id", b"", headers), body)
    good_item = (0, request_meta("good", b"", [(b"content-type", JSON.encode())]), b"{}")
    for neighbours in ([], [good_item]):
        answers = answer_batch(model, [bad_item, *neighbours], send_nowhere).answers
        assert [answer[0] for answer in answers] == [status, *[200] * len(neighbours)]
        assert reason in json.loads(bytes(answers[0][2]))["message"]
    # A client's error is not logged as an error of the model.
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == (0 if status == 400 else 2)
