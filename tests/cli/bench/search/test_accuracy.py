"""Responses of a configuration compared with those of the original archive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver.metadata.forms import FormRecord
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import Accuracy
from tsx_cli.bench.search.accuracy import (
    AccuracyGuard,
    compare_answers,
    parse_tolerance,
    verdicts_of,
)
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.plugins import ComparedAnswer


def answer(value: object, status: int = 200) -> ComparedAnswer:
    return ComparedAnswer(status, {}, json.dumps(value).encode())


@pytest.mark.parametrize(
    ("tolerance", "same_top", "kind", "rtol", "atol", "k"),
    [
        (None, None, "numeric", 1e-2, 1e-3, None),
        ("rtol=1e-2,atol=1e-3", None, "numeric", 0.01, 0.001, None),
        (" RTOL = 0.5 ", None, "numeric", 0.5, 0.0, None),
        ("atol=2", None, "numeric", 0.0, 2.0, None),
        ("exact", None, "exact", None, None, None),
        (None, 3, "top-k", None, None, 3),
    ],
)
def test_each_kind_of_comparison_has_an_option(
    tolerance: str | None,
    same_top: int | None,
    kind: str,
    rtol: float | None,
    atol: float | None,
    k: int | None,
) -> None:
    comparison = parse_tolerance(tolerance, same_top)
    assert (comparison.kind, comparison.rtol, comparison.atol, comparison.k) == (
        kind,
        rtol,
        atol,
        k,
    )


@pytest.mark.parametrize(
    ("tolerance", "same_top", "problem"),
    [
        ("1e-2", None, "'1e-2' is not a tolerance; use rtol=1e-2,atol=1e-3"),
        ("rtol=1e-2,", None, "'' is not a tolerance"),
        ("rtol=1.2.3", None, "'rtol=1.2.3' is not a tolerance"),
        ("rtol=1,rtol=2", None, "'rtol=2' is not a tolerance"),
        ("rtol=-1", None, "'rtol=-1' is not a tolerance"),
        ("rtol=9e999", None, "'rtol=9e999' is not a tolerance"),
        (None, 0, "1 to 1000"),
        ("exact", 1, "--tolerance and --same-top cannot be combined; give one of them"),
    ],
)
def test_invalid_tolerances_are_refused(
    tolerance: str | None, same_top: int | None, problem: str
) -> None:
    with pytest.raises(UsageError) as refused:
        parse_tolerance(tolerance, same_top)
    assert problem in str(refused.value)


def test_rounding_is_not_a_difference_but_another_label_is() -> None:
    expected = [answer({"cat": 0.9, "dog": 0.1}), answer([1.0, 2.0])]
    rounded = [answer({"cat": 0.8999, "dog": 0.1001}), answer([1.001, 2.0])]
    swapped_labels = [answer({"cat": 0.4, "dog": 0.6}), answer([1.0, 2.0])]
    for comparison in (parse_tolerance(), parse_tolerance(same_top=1)):
        assert compare_answers(expected, rounded, comparison).same
        accuracy = compare_answers(expected, swapped_labels, comparison)
        assert (accuracy.same, accuracy.compared, accuracy.different) == (False, 2, 1)
    assert (
        compare_answers(expected, swapped_labels, parse_tolerance()).worst
        == "input 1: dog: 0.1 (archive), 0.6 (this configuration)"
    )
    assert not compare_answers(expected, rounded, parse_tolerance("exact")).same


def test_an_error_in_place_of_a_response_is_a_difference() -> None:
    accuracy = compare_answers([answer(1)], [answer("no", 500)], parse_tolerance())
    assert accuracy.worst == "input 1: status: 200 (archive), 500 (this configuration)"


def test_repeated_responses_are_compared_with_their_own_inputs() -> None:
    accuracy = compare_answers(
        [answer(1), answer(2)], [answer(value) for value in (1, 2, 1, 2, 2)], parse_tolerance()
    )
    assert (accuracy.compared, accuracy.different, accuracy.worst) == (
        5,
        1,
        "input 1: the answer: 1 (archive), 2 (this configuration)",
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), st.floats(0, 0.1), st.floats(-1, 1))
def test_values_within_the_tolerance_are_equal(
    numbers: list[float], rtol: float, part: float
) -> None:
    rounded_numbers = [number * (1 + part * rtol) for number in numbers]
    assert compare_answers(
        [answer(numbers)],
        [answer(rounded_numbers)],
        parse_tolerance(f"rtol={rtol * 1.001 + 1e-9:.12f},atol=1e-6"),
    ).same
    assert compare_answers([answer(numbers)], [answer(numbers)], parse_tolerance("exact")).same


class Server:
    """A server whose responses `respond` makes from a body and its number; each takes a second."""

    configuration = Configuration(batch_size=4)

    def __init__(self, respond: Callable[[bytes, int], ComparedAnswer]) -> None:
        self.respond, self.now, self.calls = respond, 0.0, list[tuple[int, int]]()

    def answers(self, payloads: Sequence[Payload], batch_size: int) -> list[ComparedAnswer]:
        self.calls.append((len(payloads), batch_size))
        self.now += len(payloads)
        return [self.respond(payload.body, round(self.now)) for payload in payloads]


INPUTS = [Payload(name.encode(), "text/plain") for name in "abcdefgh"]


def test_batches_of_a_configuration_are_compared_with_single_requests() -> None:
    archive = Server(lambda body, _: answer(body.decode()))
    guard = AccuracyGuard(INPUTS[:2], parse_tolerance())
    guard.learn(archive)
    assert guard.note is None
    accuracy = guard.compare(Server(lambda body, _: answer("x" if body == b"b" else body.decode())))
    assert accuracy is not None
    assert (accuracy.compared, accuracy.different, accuracy.worst) == (
        2,
        1,
        'input 2: the answer: "b" (archive), "x" (this configuration)',
    )


def test_a_form_accepted_by_tsx_optimize_may_differ_in_numbers() -> None:
    records = [
        FormRecord(
            "int8", measured={"guard": {"passed": True, "limit": "top1>=-0.5%", "rows": 700}}
        ),
        FormRecord("int4"),
    ]
    guard = AccuracyGuard(INPUTS[:2], parse_tolerance(), verdicts=verdicts_of(records))
    guard.learn(Server(lambda body, _: answer({"cat": 0.9})))

    def compared(form: str, response: ComparedAnswer) -> Accuracy:
        server = Server(lambda *_: response)
        server.configuration = Configuration(form=form)
        accuracy = guard.compare(server)
        assert accuracy is not None
        return accuracy

    accepted_accuracy = compared("int8", answer({"cat": 0.7}))
    assert (accepted_accuracy.same, accepted_accuracy.different, accepted_accuracy.allowed) == (
        False,
        2,
        True,
    )
    assert accepted_accuracy.accepted == "tsx optimize: top1>=-0.5% held for 700 inputs"
    assert compared("int8", answer({"cat": 0.9})).accepted is None
    assert not compared("int4", answer({"cat": 0.7})).allowed
    assert not compared("int8", answer("out of order", 500)).allowed
    assert (
        verdicts_of(
            [
                FormRecord("a", measured={"guard": guard})
                for guard in (None, 3, {"passed": False}, {})
            ]
        )
        == {}
    )


def test_a_slow_model_is_compared_with_few_inputs() -> None:
    archive = Server(lambda body, _: answer(body.decode()))
    guard = AccuracyGuard(INPUTS, parse_tolerance(), clock=lambda: archive.now)
    guard.learn(archive)
    assert guard.compare(archive) is not None
    assert archive.calls == [(1, 1)] * 4 + [(4, 1), (4, 4)]


def test_a_nondeterministic_model_is_not_compared() -> None:
    archive = Server(lambda _, number: answer(number))
    guard = AccuracyGuard(INPUTS, parse_tolerance())
    guard.learn(archive)
    assert "answers the same request differently each time (input 1: " in str(guard.note)
    assert guard.compare(archive) is None


def test_an_input_that_the_archive_refuses_is_an_error_with_a_remedy() -> None:
    with pytest.raises(
        CliError, match=r"answers an input with 400: no image\. Correct --input or --content-type"
    ):
        AccuracyGuard(INPUTS, parse_tolerance()).learn(
            Server(lambda *_: ComparedAnswer(400, {}, b"no image"))
        )
