"""Recovery of failed batches: guilty requests get errors, and innocent ones answers."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.served_model import a_served_model, answers_of
from tsx_runtime.worker.exceptions import InvalidInput, PredictionException
from tsx_runtime.worker.execution.batch import ServedModel
from tsx_runtime.worker.execution.recovery import (
    GROW_AFTER,
    MIN_EQUAL_FAILURES,
    Ceiling,
    RetrySearch,
)
from tsx_runtime.worker.handler_api.context import Context

pytestmark = pytest.mark.slow


SIZES = st.integers(1, 64)
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 1.00 GiB."


class Handler:
    """A handler that raises an error if a row demands it, and that changes its rows."""

    def __init__(self, max_size: int = 1 << 20) -> None:
        self.calls: list[int] = []
        self.max_size = max_size

    def __call__(self, data: Any, context: Context) -> list[Any]:
        self.calls.append(len(data))
        if len(data) > self.max_size:
            raise RuntimeError(OUT_OF_MEMORY)
        answers = []
        for idx, row in enumerate(data):
            text = row.pop("body").decode()
            row["seen"] = True
            context.set_response_header(idx, "X-Text", text)
            if text.startswith("guilty"):
                raise ValueError(text)
            if text.startswith("refused"):
                raise PredictionException(text, 422)
            if text.startswith("invalid"):
                raise InvalidInput(text)
            answers.append(f"{context.get_request_id(idx)} {text}")
        data.clear()
        return answers

    def model(self, **changes: Any) -> ServedModel:
        return a_served_model(self, **changes)


def run(model: ServedModel, rows: list[str]) -> list[tuple[int, str]]:
    return [
        (status, json.loads(body)["message"] if status >= 400 else body.decode())
        for status, _, body in answers_of(model, *map(str.encode, rows))
    ]


def expected(rows: list[str]) -> list[tuple[int, str]]:
    """Return the answer that each row would get alone."""
    answers = []
    for number, row in enumerate(rows):
        status = {"guilty": 500, "refused": 422, "invalid": 400}.get(row.split()[0], 200)
        texts = {200: f"id-{number} {row}", 500: f"Prediction failed: ValueError: {row}"}
        answers.append((status, texts.get(status, row)))
    return answers


@given(SIZES, st.data())
def test_guilty_requests_get_errors_and_all_others_answers(size: int, data: st.DataObject) -> None:
    guilty_indexes = data.draw(st.sets(st.integers(0, size - 1), max_size=MIN_EQUAL_FAILURES - 1))
    kind = data.draw(st.sampled_from(["guilty", "refused"]))
    rows = [f"{kind} {idx}" if idx in guilty_indexes else f"row {idx}" for idx in range(size)]
    handler = Handler()
    assert run(handler.model(), rows) == expected(rows)
    assert (
        len(handler.calls) <= 1 + MIN_EQUAL_FAILURES + 2 * len(guilty_indexes) * size.bit_length()
    )


@given(SIZES, st.sampled_from(["refused", "invalid"]), st.data())
def test_requests_refused_as_client_errors_do_not_fail_others(
    size: int, kind: str, data: st.DataObject
) -> None:
    refused_indexes = data.draw(st.sets(st.integers(0, size - 1)))
    rows = [f"{kind if idx in refused_indexes else 'row'} {idx}" for idx in range(size)]
    with mock.patch("tsx_runtime.worker.execution.batch.logger.error") as log_error:
        assert run(Handler().model(), rows) == expected(rows)
    assert log_error.called == (kind == "refused" and bool(refused_indexes))


@given(st.lists(st.sampled_from(["row", "guilty", "refused"]), min_size=1, max_size=40))
def test_all_guilty_requests_get_errors_if_the_first_is_innocent(
    kinds: list[str],
) -> None:
    rows = [f"{kind} {idx}" for idx, kind in enumerate(["row", *kinds])]
    handler = Handler()
    assert run(handler.model(), rows) == expected(rows)
    assert len(handler.calls) <= 2 * len(rows) + MIN_EQUAL_FAILURES


@given(st.integers(MIN_EQUAL_FAILURES + 1, 64))
def test_a_handler_that_always_fails_is_called_only_four_times(size: int) -> None:
    handler = Handler()
    answers = run(handler.model(), [f"guilty {idx}" for idx in range(size)])
    assert [status for status, _ in answers] == [500] * size
    assert handler.calls == [size] + [1] * MIN_EQUAL_FAILURES


@given(SIZES, st.integers(1, 64), st.data())
def test_a_guilty_request_is_found_also_if_the_batch_does_not_fit_into_memory(
    size: int, max_size: int, data: st.DataObject
) -> None:
    guilty_indexes = data.draw(st.sets(st.integers(0, size - 1), max_size=MIN_EQUAL_FAILURES - 1))
    rows = [f"guilty {idx}" if idx in guilty_indexes else f"row {idx}" for idx in range(size)]
    handler = Handler(max_size)
    assert run(handler.model(), rows) == expected(rows)


@given(SIZES, st.integers(1, 64))
def test_a_batch_is_cut_until_it_fits_and_later_ones_in_advance(size: int, max_size: int) -> None:
    handler = Handler(max_size)
    model = handler.model()
    rows = [f"row {idx}" for idx in range(size)]
    assert run(model, rows) == expected(rows)
    if size > max_size:
        assert model.ceiling.size is not None
        assert max_size / 2 - 1 < model.ceiling.size <= max_size
    handler.calls.clear()
    assert run(model, rows) == expected(rows)
    assert max(handler.calls) <= max_size


def test_a_batch_that_raises_memory_error_is_cut() -> None:
    def handle(data: Any, context: Context) -> list[str]:
        if len(data) > 3:
            raise MemoryError
        return [row["body"].decode() for row in data]

    model = a_served_model(handle)
    assert [status for status, _ in run(model, ["row"] * 16)] == [200] * 16


def test_nothing_is_retried_shortly_before_the_timeout() -> None:
    handler = Handler()
    rows = ["row"] * 7 + ["guilty"]
    assert (
        run(handler.model(response_timeout=0.0), rows)
        == [(500, "Prediction failed: ValueError: guilty")] * 8
    )
    assert handler.calls == [8]


@given(st.permutations(["plain", "plain", "plain", "guilty", "stream", "stream"]))
def test_only_requests_without_sent_parts_are_retried(
    rows: list[str],
) -> None:
    begun_ids = []

    def handle(data: Any, context: Context) -> list[str]:
        for idx, row in enumerate(data):
            kind = row["body"].decode()
            if kind == "guilty":
                raise ValueError(kind)
            if kind == "stream":
                begun_ids.append(context.get_request_id(idx))
                context.send_piece(idx, b"part")
        return ["whole"] * len(data)

    model = a_served_model(handle)
    failed = (500, "Prediction failed: ValueError: guilty")
    first_rows = rows[: rows.index("guilty")]
    assert run(model, rows) == [
        failed
        if row == "guilty" or (row == "stream" and number < len(first_rows))
        else (200, "whole")
        for number, row in enumerate(rows)
    ]
    assert len(begun_ids) == len(set(begun_ids)) == 2


def test_a_broken_streaming_handler_is_also_called_only_four_times() -> None:
    calls = []

    def handle(data: Any, context: Context) -> list[str]:
        calls.append(len(data))
        context.send_piece(0, b"part")
        raise ValueError("boom")

    model = a_served_model(handle)
    assert [status for status, _ in run(model, ["row"] * 8)] == [500] * 8
    assert calls == [8, 1, 1, 1]


def test_a_wrong_number_of_answers_is_not_retried() -> None:
    calls = []

    def handle(data: Any, context: Context) -> list[str]:
        calls.append(len(data))
        return ["one"]

    model = a_served_model(handle)
    assert [status for status, _ in run(model, ["row"] * 4)] == [500] * 4
    assert calls == [4]


@given(st.lists(st.sampled_from("ab"), max_size=8), st.booleans())
def test_a_handler_is_blamed_if_enough_requests_fail_alike_and_none_succeeds(
    error_lines: list[str], has_succeeded: bool
) -> None:
    search = RetrySearch(Ceiling(), 1.0)
    for line in error_lines:
        search.record_failure([0], line)
    if has_succeeded:
        search.record_success()
    search.retry([1])
    is_blamed = (
        not has_succeeded and len(error_lines) >= MIN_EQUAL_FAILURES and len(set(error_lines)) == 1
    )
    assert search.next(0.0, 0.0) == ([] if is_blamed else [1])


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_retry_never_exceeds_the_timeout(
    used_s: float, longest_call_s: float, timeout_s: float
) -> None:
    search = RetrySearch(Ceiling(), timeout_s)
    search.retry([0])
    if search.next(used_s, longest_call_s):
        assert used_s + longest_call_s <= timeout_s


@given(SIZES, st.randoms(use_true_random=False))
def test_the_search_always_ends_and_covers_all_requests(size: int, random: Any) -> None:
    search = RetrySearch(Ceiling(), 100.0)
    search.record_failure(range(size), "somewhere")
    settled_positions: list[int] = list(range(size)) if size == 1 else []
    used_s = 0.0
    while positions := search.next(used_s, 1.0):
        used_s += random.choice([0.0, 0.1, 5.0])
        if random.random() < 0.5:
            search.record_success()
            settled_positions += positions
        else:
            search.record_failure(positions, random.choice("ab"))
            settled_positions += positions if len(positions) == 1 else []
    assert sorted(settled_positions + search.given_up) == list(range(size))


@given(st.integers(2, 64), st.lists(st.integers(1, 64), max_size=60), st.integers(1, 63))
def test_a_ceiling_is_at_least_one_and_keeps_all_requests(
    first_size: int, sizes: list[int], max_size: int
) -> None:
    ceiling = Ceiling()
    ceiling.record_failure(first_size)
    for size in sizes:
        parts = ceiling.split(size)
        assert [idx for part in parts for idx in part] == list(range(size))
        for part in parts:
            assert ceiling.size is None or len(part) <= ceiling.size or ceiling.size < len(parts[0])
            if len(part) > max_size and len(part) > 1:
                ceiling.record_failure(len(part))
                break
            ceiling.record_success(len(part))
        assert ceiling.size is None or ceiling.size >= 1


def test_a_ceiling_grows_slowly_and_falls_back_if_too_large() -> None:
    ceiling = Ceiling()
    ceiling.record_failure(32)
    for _ in range(GROW_AFTER - 1):
        assert not ceiling.record_success(16)
    assert ceiling.record_success(16)
    assert ceiling.size == 20
    assert not ceiling.record_success(9)
    ceiling.record_failure(20)
    assert ceiling.size == 16
    assert [ceiling.record_success(16) for _ in range(GROW_AFTER * 10)].index(
        True
    ) == GROW_AFTER * 10 - 1
    for _ in range(GROW_AFTER * 100):
        if ceiling.size is not None:
            ceiling.record_success(ceiling.size)
    # A batch of 32, which failed at first, max_size now.
    assert ceiling.size is None
