"""Verdicts on forms: whether their responses keep the limits, and with what confidence."""

from __future__ import annotations

import json
import math
import operator
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsx_cli.common.failure import CliError
from tsx_cli.optimize.guard.limits import parse_limits
from tsx_cli.optimize.guard.verdict import FormGuard
from tsx_runtime.plugins import ComparedAnswer

CAT, DOG = {"cat": 0.9, "dog": 0.1}, {"cat": 0.2, "dog": 0.8}
BOX = [{"cat": [0, 0, 10, 10], "score": 0.9}]


def answer(value: Any, status: int = 200) -> ComparedAnswer:
    return ComparedAnswer(status, {"content-type": "application/json"}, json.dumps(value).encode())


def answers(values: Sequence[Any]) -> list[ComparedAnswer]:
    return [answer(value) for value in values]


def guard_of(reference: list[ComparedAnswer], limit: str, labels: Any = None) -> FormGuard:
    return FormGuard(reference, parse_limits(limit), labels)


def tensor(shape: list[int], data: list[Any], **more: str) -> Any:
    output = {"name": "y", "datatype": "FP32", "shape": shape, "data": data}
    return {"model_name": "m", "outputs": [output], **more}


def vectors(count: int, noise: float = 0.0) -> list[Any]:
    random_source, noises = random.Random(0), random.Random(1)
    return [
        [random_source.gauss(0, 1) + noises.gauss(0, noise) for _ in range(8)] for _ in range(count)
    ]


TOP1, COSINE, EXACT = "top1>=-0.5%", "cosine>=0.999", "exact>=-0.5%"
TOLERANCE = "tolerance rtol=1e-2,atol=1e-3"


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (CAT, TOP1),
        ([0.25, 0.75], TOP1),
        ([{"label": "cat", "score": 0.9}], TOP1),
        (tensor([1, 2], [0.25, 0.75]), TOP1),
        (BOX, "map>=-0.5%"),
        ([1.5, -0.3, 7.0], COSINE),
        (tensor([1, 3], [1.5, -0.3, 7.0], id="a"), COSINE),
        ({"label": "cat", "score": 0.9}, TOP1),
        ({"class": 2, "probability": 0.9}, TOP1),
        ([{"label": 0, "score": 0.6}, {"label": 1, "score": 0.3}], TOP1),
        ({"class": 2, "distance": 7.5}, TOLERANCE),
        ([0.25, 0.25], COSINE),
        ({"price": 12.5}, TOLERANCE),
        ({"value": 0.37}, TOLERANCE),
        ([0.37], TOLERANCE),
        (0.37, TOLERANCE),
        (tensor([1, 1], [0.37]), TOLERANCE),
        (["a"], EXACT),
        ([3, 17, 29], EXACT),
        (["a", "b"], EXACT),
        ("words", EXACT),
    ],
)
def test_the_default_limit_depends_on_the_kind_of_responses(value: Any, limit: str) -> None:
    reference = answers([value] * 600)
    guard = FormGuard(reference)
    assert guard.limit == limit
    assert guard.judge(reference).passed


def test_too_few_agreeing_rows_prove_nothing_and_the_required_number_is_reported() -> None:
    reference = answers([CAT, DOG] * 60)
    guard = FormGuard(reference)
    verdict = guard.judge(list(reference))
    assert not verdict.passed
    assert verdict.text.endswith("95 % confidence of top1>=-0.5% needs 598 rows, 478 more")
    assert (verdict.value, verdict.loss, verdict.rows) == (1.0, 0.0, 120)
    assert verdict.loss_bound == pytest.approx(1 - 0.05 ** (1 / 120))
    assert guard.shortage is not None
    assert guard.shortage[0] == 598
    assert "there are 120" in guard.shortage[1]
    assert guard.hopeless_reason(reference[:60]) is None
    larger_guard = FormGuard(reference * 5)
    assert larger_guard.shortage is None
    text = larger_guard.judge(reference * 5).text
    assert text.startswith("top1 agreed on 600 of 600 rows")
    assert text.endswith("at most 0.498 %")


def test_a_form_within_the_noise_of_the_limit_does_not_pass() -> None:
    reference = answers([CAT] * 1000)
    changed_answers = answers([DOG] * 3) + reference[3:]
    verdict = FormGuard(reference).judge(changed_answers)
    assert verdict.loss == pytest.approx(0.003)
    assert (verdict.passed, verdict.loss_bound > 0.005) == (False, True)
    assert "needs about " in verdict.text
    assert guard_of(reference, "top1>=-1%").judge(changed_answers).passed


@pytest.mark.parametrize(
    "value", [{"cat": math.nan, "dog": math.nan}, {"cat": 0.5, "dog": 0.5}, {"dog": 0.9}, [], "cat"]
)
def test_a_response_without_the_label_as_the_best_is_a_loss(value: Any) -> None:
    reference = answers([CAT] * 700)
    assert FormGuard(reference).judge([answer(value)] * 700).value == 0.0


def test_top5_accepts_the_label_among_the_five_best() -> None:
    scores = {str(number): 0.3 - number / 100 for number in range(8)}
    fifth_best, sixth_best = scores | {"0": 0.255}, scores | {"0": 0.245}
    reference = answers([scores] * 700)
    guard = guard_of(reference, "top5>=-0.5%")
    assert guard.judge([answer(fifth_best)] * 700).value == 1.0
    assert guard.judge([answer(sixth_best)] * 700).value == 0.0


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("top1>=-1%", CAT),
        ("map>=-1%", BOX),
        ("cosine>=0.9", CAT),
        ("exact>=-1%", CAT),
        ("perplexity<=+1%", [[0.1, 0.9], [0.2, 0.8]]),
        ("own>=-1%", CAT),
        (None, CAT),
    ],
)
def test_a_failed_response_is_a_loss_for_every_metric(limit: str | None, value: Any) -> None:
    reference = answers([value] * 400)
    limits = (
        parse_limits(limit, custom="own" if limit.startswith("own") else None)
        if limit
        else parse_limits(tolerance="rtol=1e-2")
    )
    guard = FormGuard(reference, limits, custom=lambda answers, labels: 1.0)
    assert guard.judge(reference).passed
    failed = [answer({"code": 500}, 500)] * 80 + reference[80:]
    verdict = guard.judge(failed)
    assert (verdict.passed, verdict.loss >= 0.2) == (False, True)
    assert guard.hopeless_reason(failed[:100]) is not None
    assert guard.hopeless_reason(reference[:100]) is None


def test_failed_responses_for_empty_images_are_also_losses() -> None:
    reference = answers([BOX] * 600 + [[]] * 60)
    assert not FormGuard(reference).judge(reference[:600] + [answer({}, 503)] * 60).passed


def test_another_content_type_is_a_loss() -> None:
    reference = answers([CAT] * 600)
    plain = ComparedAnswer(200, {"content-type": "text/plain"}, reference[0].body)
    assert FormGuard(reference).judge([plain] * 600).value == 0.0


def test_labels_decide_whether_a_change_is_a_loss() -> None:
    reference = answers([CAT] * 950 + [DOG] * 50)
    labels = ["cat"] * 1000
    guard = guard_of(reference, "top1>=-0.5%", labels)
    better = guard.judge(answers([CAT] * 1000))
    assert (better.passed, better.reference, better.value) == (True, 0.95, 1.0)
    assert better.loss == pytest.approx(-0.05)
    assert better.text.startswith("top1 is right on 1000 of 1000 rows, the reference on 950;")
    swapped = guard.judge(answers([DOG] * 50 + [CAT] * 950))
    assert (swapped.passed, swapped.loss) == (False, 0.0)
    # Better responses to later rows may compensate for these.
    assert guard.hopeless_reason(answers([DOG] * 20)) is None
    assert guard.hopeless_reason(answers([DOG] * 60)) is not None


def test_a_label_may_be_the_index_of_the_highest_score() -> None:
    reference = answers([[0.1, 2.0, 0.3]] * 600)
    for label in (1, "1"):
        guard = guard_of(reference, "top1>=0.9", [label] * 600)
        assert guard.judge(reference).value == 1.0
    with pytest.raises(CliError, match="the model says '1', the file says 'cat'"):
        guard_of(reference, "top1>=-1%", ["cat"] * 600)


def test_a_few_responses_are_judged_only_by_their_loss() -> None:
    guard = guard_of(answers([CAT] * 10), "top1>=-10%,cosine>=0.9")
    assert guard.is_within_limits(answers([CAT] * 9 + [DOG]))
    assert not guard.is_within_limits(answers([CAT] * 8 + [DOG] * 2))
    assert not guard.is_within_limits([*answers([CAT] * 9), answer(CAT, 500)])


def test_a_limit_may_be_an_absolute_value() -> None:
    reference = answers([CAT] * 100)
    labels = ["cat"] * 99 + ["dog"]
    guard = guard_of(reference, "top1>=0.95", labels)
    verdict = guard.judge(reference)
    assert verdict.text.endswith("with 95 % confidence it is at least 0.95344")
    assert (verdict.passed, verdict.loss) == (True, 0.0)
    assert not guard.judge([answer(DOG)] * 2 + reference[2:]).passed
    with pytest.raises(CliError, match=r"has top1 0\.99: no form can keep top1>=0\.995"):
        guard_of(reference, "top1>=0.995", labels)


def test_cosine_limits_the_mean_and_needs_29_rows() -> None:
    reference = answers(vectors(100))
    guard = FormGuard(reference)
    near, far = (guard.judge(answers(vectors(100, noise))) for noise in (0.01, 0.1))
    assert (near.passed, far.passed) == (True, False)
    assert 1 - near.value < near.loss_bound < 0.001
    smaller_guard = FormGuard(reference[:28])
    assert smaller_guard.judge(reference[:28]).text.endswith("needs about 29 rows, 1 more")
    assert smaller_guard.shortage is not None
    assert FormGuard(reference[:29]).judge(reference[:29]).passed


@pytest.mark.parametrize("value", [[0.5, 1.0], [0.0] * 8, [math.nan] * 8, {"x": [1.0] * 8}, "text"])
def test_values_of_another_shape_or_zero_vectors_are_losses(value: Any) -> None:
    assert FormGuard(answers(vectors(50))).judge([answer(value)] * 50).value == 0.0


def test_an_id_of_the_open_inference_protocol_is_ignored() -> None:
    reference = answers([tensor([1, 2], [0.5, 7.5], id=str(row)) for row in range(600)])
    renamed = answers([tensor([1, 2], [0.5, 7.5], id="other")] * 600)
    assert guard_of(reference, EXACT).judge(renamed).passed


def test_boxes_may_move_within_the_limit() -> None:
    def moved(shift: float) -> list[ComparedAnswer]:
        return answers([[{"cat": [shift, 0, 10 + shift, 10], "score": 0.9}]] * 600)

    guard = FormGuard(moved(0))
    near, far = guard.judge(moved(0.1)), guard.judge(moved(1))
    assert (near.value, near.passed) == (1.0, True)
    # An overlap (IoU) of 9/11 counts at the thresholds from 0.5 to 0.8.
    assert (far.value, far.passed) == (pytest.approx(0.7), False)
    assert guard.hopeless_reason(moved(1)[:300]) is not None
    with pytest.raises(CliError, match="map 0"):
        guard_of(answers([[]] * 20), "map>=-1%")


def test_perplexity_uses_the_labels_or_the_references_best_tokens() -> None:
    reference = answers([[[math.log(0.5), math.log(0.25), math.log(0.25)]] * 4] * 100)
    flat = answers([[[0.0, 0.0, 0.0]] * 4] * 100)
    guard = guard_of(reference, "perplexity<=+1%")
    equal, worse = guard.judge(reference), guard.judge(flat)
    assert (equal.value, equal.passed) == (pytest.approx(2.0), True)
    assert (worse.value, worse.loss) == (pytest.approx(3.0), pytest.approx(0.5))
    assert not worse.passed
    labelled = guard_of(reference, "perplexity<=5", [[1, 1, 2, 2]] * 100).judge(reference)
    assert (labelled.value, labelled.passed) == (pytest.approx(4.0), True)
    with pytest.raises(CliError, match="there is not one token"):
        guard_of(reference, "perplexity<=5", [[1]] * 100)


def test_every_row_must_be_within_the_tolerance() -> None:
    reference = answers(vectors(40))
    guard = FormGuard(reference, parse_limits(tolerance="rtol=1e-2,atol=1e-2"))
    text = guard.judge(answers(vectors(40, 1e-4))).text
    assert text.startswith("tolerance rtol=1e-2,atol=1e-2 holds for 40 of 40 rows;")
    assert "at most 7.22 %" in text
    off = [answer([9.0] * 8), *reference[1:]]
    assert not guard.judge(off).passed
    assert guard.hopeless_reason(off[:1]) is not None


def test_a_custom_metric_gets_responses_and_labels() -> None:
    calls = []

    def accuracy(values: list[Any], labels: list[Any]) -> float:
        calls.append((values[0], labels[0]))
        best = [max(scores, key=scores.__getitem__) for scores in values]
        return sum(map(operator.eq, best, labels)) / len(best)

    reference = answers([CAT] * 200)
    guard = FormGuard(
        reference, parse_limits("accuracy>=-2%", custom="accuracy"), ["cat"] * 200, accuracy
    )
    assert guard.judge(reference).passed
    assert calls[0] == (CAT, "cat")
    verdict = guard.judge([answer(DOG)] * 10 + reference[10:])
    assert (verdict.loss, verdict.passed) == (pytest.approx(0.05), False)
    assert guard.hopeless_reason([answer(DOG)] * 10) is None
    with pytest.raises(CliError, match=r"accuracy.* raised AttributeError"):
        guard.judge([answer(3)] * 200)


def test_the_missed_one_of_several_limits_is_reported() -> None:
    reference = answers([{"cat": 0.9, "dog": 0.1}] * 600)
    changed_answers = answers([{"cat": 0.6, "dog": 0.4}] * 600)
    guard = guard_of(reference, "top1>=-0.5%,cosine>=0.999")
    assert (guard.judge(changed_answers).metric, guard.judge(changed_answers).passed) == (
        "cosine",
        False,
    )
    assert guard.judge(reference).passed


def test_a_form_with_too_few_rows_is_unproven() -> None:
    reference = answers([CAT] * 600)
    guard = guard_of(reference, "top1>=-0.5%,exact>=-1%")
    one_lost = [answer(DOG), *reference[1:]]
    verdict = guard.judge(one_lost)
    assert (verdict.passed, verdict.metric) == (False, "top1")
    assert verdict.rows_needed is not None
    assert verdict.rows_needed > 600
    assert f"needs about {verdict.rows_needed} rows" in verdict.text
    # The form stays unproven until all rows are compared.
    assert guard.hopeless_reason(one_lost[:32]) is None
    assert guard.judge(reference).rows_needed is None
    assert guard.judge([answer(DOG)] * 4 + reference[4:]).rows_needed is None


def test_a_missed_limit_takes_precedence_over_an_unproven_one() -> None:
    reference = answers([CAT] * 40)
    guard = guard_of(reference, "top1>=-0.1%,exact>=-20%")
    changed_answers = answers([{"cat": 0.8, "dog": 0.2}] * 9) + reference[9:]
    assert (guard.judge(changed_answers).metric, guard.judge(changed_answers).rows_needed) == (
        "exact",
        None,
    )


def test_a_reference_that_fails_is_reported() -> None:
    with pytest.raises(CliError, match="the model as it is answers a row with 400"):
        FormGuard([answer(CAT), answer({"error": "no"}, 400)])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([CAT, DOG]), min_size=30, max_size=80),
    st.integers(1, 29),
    st.sampled_from(["top1>=-12%", "cosine>=0.9"]),
)
def test_a_hopeless_form_never_passes(values: list[Any], first: int, limit: str) -> None:
    reference, changed_answers = answers([CAT] * len(values)), answers(values)
    guard = guard_of(reference, limit)
    verdict = guard.judge(changed_answers)
    assert verdict.loss <= verdict.loss_bound
    if guard.hopeless_reason(changed_answers[:first]) is not None:
        for later in (changed_answers[first:], reference[first:]):
            assert not guard.judge([*changed_answers[:first], *later]).passed
