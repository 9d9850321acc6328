"""A batch that fails: the guilty get their own error, the innocent their answers, and a broken
handler costs little.
"""

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
    ALIKE,
    GROW_AFTER,
    Ceiling,
    Search,
)
from tsx_runtime.worker.handler_api.context import Context

pytestmark = pytest.mark.slow


SIZES = st.integers(1, 64)
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 1.00 GiB."


class Handler:
    """Raises where a row says so; changes the rows it gets, as handlers may."""

    def __init__(self, fits: int = 1 << 20) -> None:
        self.calls: list[int] = []
        self.fits = fits

    def __call__(self, data: Any, context: Context) -> list[Any]:
        self.calls.append(len(data))
        if len(data) > self.fits:
            raise RuntimeError(OUT_OF_MEMORY)
        answers = []
        for idx, row in enumerate(data):
            word = row.pop("body").decode()
            row["seen"] = True
            context.set_response_header(idx, "X-Word", word)
            if word.startswith("guilty"):
                raise ValueError(word)
            if word.startswith("refused"):
                raise PredictionException(word, 422)
            if word.startswith("invalid"):
                raise InvalidInput(word)
            answers.append(f"{context.get_request_id(idx)} {word}")
        data.clear()
        return answers

    def model(self, **what: Any) -> ServedModel:
        return a_served_model(self, **what)


def run(model: ServedModel, words: list[str]) -> list[tuple[int, str]]:
    return [
        (status, json.loads(body)["message"] if status >= 400 else body.decode())
        for status, _, body in answers_of(model, *map(str.encode, words))
    ]


def expected(words: list[str]) -> list[tuple[int, str]]:
    return [
        (500, f"Prediction failed: ValueError: {word}")
        if word.startswith("guilty")
        else (422, word)
        if word.startswith("refused")
        else (200, f"id-{number} {word}")
        for number, word in enumerate(words)
    ]


@given(SIZES, st.data())
def test_few_guilty_requests_get_their_own_errors_and_all_others_their_answers(
    size: int, data: st.DataObject
) -> None:
    guilty = data.draw(st.sets(st.integers(0, size - 1), max_size=ALIKE - 1))
    kind = data.draw(st.sampled_from(["guilty", "refused"]))
    words = [f"{kind} {idx}" if idx in guilty else f"word {idx}" for idx in range(size)]
    handler = Handler()
    assert run(handler.model(), words) == expected(words)
    assert len(handler.calls) <= 1 + ALIKE + 2 * len(guilty) * size.bit_length()


@given(SIZES, st.data())
def test_requests_refused_with_a_status_of_the_client_fail_no_other_however_many_they_are(
    size: int, data: st.DataObject
) -> None:
    refused = data.draw(st.sets(st.integers(0, size - 1)))
    words = [f"{'refused' if idx in refused else 'word'} {idx}" for idx in range(size)]
    assert run(Handler().model(), words) == expected(words)


@given(st.lists(st.sampled_from(["word", "guilty", "refused"]), min_size=1, max_size=40))
def test_any_guilty_get_their_own_errors_where_one_of_the_first_samples_is_innocent(
    kinds: list[str],
) -> None:
    words = [f"{kind} {idx}" for idx, kind in enumerate(["word", *kinds])]
    handler = Handler()
    assert run(handler.model(), words) == expected(words)
    assert len(handler.calls) <= 2 * len(words) + ALIKE


@given(st.integers(ALIKE + 1, 64))
def test_a_handler_that_always_fails_is_called_four_times_and_all_are_reported(size: int) -> None:
    handler = Handler()
    answers = run(handler.model(), [f"guilty {idx}" for idx in range(size)])
    assert [status for status, _ in answers] == [500] * size
    assert handler.calls == [size] + [1] * ALIKE


@given(SIZES, st.integers(1, 64), st.data())
def test_a_poisonous_request_is_found_in_a_batch_that_does_not_fit_the_memory_either(
    size: int, fits: int, data: st.DataObject
) -> None:
    guilty = data.draw(st.sets(st.integers(0, size - 1), max_size=ALIKE - 1))
    words = [f"guilty {idx}" if idx in guilty else f"word {idx}" for idx in range(size)]
    handler = Handler(fits)
    assert run(handler.model(), words) == expected(words)


@given(SIZES, st.integers(1, 64))
def test_a_batch_is_cut_until_it_fits_and_later_ones_before_they_fail(size: int, fits: int) -> None:
    handler = Handler(fits)
    model = handler.model()
    words = [f"word {idx}" for idx in range(size)]
    assert run(model, words) == expected(words)
    if size > fits:
        assert model.ceiling.size is not None
        assert fits / 2 - 1 < model.ceiling.size <= fits
    handler.calls.clear()
    assert run(model, words) == expected(words)
    assert max(handler.calls) <= fits


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=repr,
)
def test_a_batch_that_runs_out_of_memory_is_cut_whatever_names_it(error: Exception) -> None:
    def handle(data: Any, context: Context) -> list[str]:
        if len(data) > 3:
            raise error
        return [row["body"].decode() for row in data]

    model = a_served_model(handle)
    assert [status for status, _ in run(model, ["word"] * 16)] == [200] * 16


def test_nothing_is_tried_again_once_its_time_is_nearly_over() -> None:
    handler = Handler()
    words = ["word"] * 7 + ["guilty"]
    assert (
        run(handler.model(response_timeout=0.0), words)
        == [(500, "Prediction failed: ValueError: guilty")] * 8
    )
    assert handler.calls == [8]


@given(st.permutations(["plain", "plain", "plain", "guilty", "stream", "stream"]))
def test_in_a_batch_that_fails_what_has_begun_is_not_tried_again_and_what_has_not_is(
    words: list[str],
) -> None:
    begun = []

    def handle(data: Any, context: Context) -> list[str]:
        for idx, row in enumerate(data):
            word = row["body"].decode()
            if word == "guilty":
                raise ValueError(word)
            if word == "stream":
                begun.append(context.get_request_id(idx))
                context.send_piece(idx, b"part")
        return ["whole"] * len(data)

    model = a_served_model(handle)
    failed = (500, "Prediction failed: ValueError: guilty")
    first = words[: words.index("guilty")]
    assert run(model, words) == [
        failed if word == "guilty" or (word == "stream" and number < len(first)) else (200, "whole")
        for number, word in enumerate(words)
    ]
    assert len(begun) == len(set(begun)) == 2


def test_a_broken_handler_that_streams_costs_no_more_calls_than_one_that_does_not() -> None:
    calls = []

    def handle(data: Any, context: Context) -> list[str]:
        calls.append(len(data))
        context.send_piece(0, b"part")
        raise ValueError("boom")

    model = a_served_model(handle)
    assert [status for status, _ in run(model, ["word"] * 8)] == [500] * 8
    assert calls == [8, 1, 1, 1]


def test_a_wrong_number_of_answers_is_not_tried_again() -> None:
    calls = []

    def handle(data: Any, context: Context) -> list[str]:
        calls.append(len(data))
        return ["one"]

    model = a_served_model(handle)
    assert [status for status, _ in run(model, ["word"] * 4)] == [500] * 4
    assert calls == [4]


@given(st.lists(st.sampled_from("ab"), max_size=8), st.booleans())
def test_a_handler_is_blamed_only_when_enough_fail_alike_and_none_succeeds(
    alone: list[str], succeeded: bool
) -> None:
    search = Search(Ceiling(), 1.0)
    for place in alone:
        search.failed([0], place)
    if succeeded:
        search.succeeded()
    search.again([1])
    blamed = not succeeded and len(alone) >= ALIKE and len(set(alone)) == 1
    assert search.next(0.0, 0.0) == ([] if blamed else [1])


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e4))
def test_another_try_never_goes_past_the_timeout(
    used: float, longest: float, timeout: float
) -> None:
    search = Search(Ceiling(), timeout)
    search.again([0])
    if search.next(used, longest):
        assert used + longest <= timeout


@given(SIZES, st.randoms(use_true_random=False))
def test_whatever_fails_the_search_ends_and_leaves_nobody_out(size: int, random: Any) -> None:
    search = Search(Ceiling(), 100.0)
    search.failed(range(size), "somewhere")
    settled: list[int] = list(range(size)) if size == 1 else []
    used = 0.0
    while positions := search.next(used, 1.0):
        used += random.choice([0.0, 0.1, 5.0])
        if random.random() < 0.5:
            search.succeeded()
            settled += positions
        else:
            search.failed(positions, random.choice("ab"))
            settled += positions if len(positions) == 1 else []
    assert sorted(settled + search.given_up) == list(range(size))


@given(st.integers(2, 64), st.lists(st.integers(1, 64), max_size=60), st.integers(1, 63))
def test_a_ceiling_is_at_least_one_and_never_cuts_a_request_away(
    first: int, sizes: list[int], fits: int
) -> None:
    ceiling = Ceiling()
    ceiling.failed(first)
    for size in sizes:
        cut = ceiling.cut(size)
        assert [idx for part in cut for idx in part] == list(range(size))
        for part in cut:
            assert ceiling.size is None or len(part) <= ceiling.size or ceiling.size < len(cut[0])
            if len(part) > fits and len(part) > 1:
                ceiling.failed(len(part))
                break
            ceiling.fitted(len(part))
        assert ceiling.size is None or ceiling.size >= 1


def test_a_ceiling_grows_slowly_and_falls_back_when_it_grew_too_far() -> None:
    ceiling = Ceiling()
    ceiling.failed(32)
    for _ in range(GROW_AFTER - 1):
        assert not ceiling.fitted(16)
    assert ceiling.fitted(16)
    assert ceiling.size == 20
    assert not ceiling.fitted(9)  # says nothing about 20
    ceiling.failed(20)
    assert ceiling.size == 16
    assert [ceiling.fitted(16) for _ in range(GROW_AFTER * 10)].index(True) == GROW_AFTER * 10 - 1
    for _ in range(GROW_AFTER * 100):
        if ceiling.size is not None:
            ceiling.fitted(ceiling.size)
    assert ceiling.size is None  # 32 fits now


@given(st.integers(1, 64), st.data())
def test_invalid_inputs_are_refused_one_by_one_however_many_they_are(
    size: int, data: st.DataObject
) -> None:
    invalid = data.draw(st.sets(st.integers(0, size - 1)))
    words = [f"{'invalid' if idx in invalid else 'word'} {idx}" for idx in range(size)]
    logged: list[Any] = []
    with mock.patch("tsx_runtime.worker.execution.batch.logger.error", logged.append):
        assert run(Handler().model(), words) == [
            (400, word) if word.startswith("invalid") else (200, f"id-{idx} {word}")
            for idx, word in enumerate(words)
        ]
    assert logged == []
