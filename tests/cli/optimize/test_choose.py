"""The order of trials of forms, their speedup over batch sizes, and the choice among them."""

from __future__ import annotations

from typing import Any

import pytest

from tsx_cli.common.failure import UsageError
from tsx_cli.optimize.choose import (
    ORDER,
    describe_choice,
    judge_form,
    rank_forms,
    same_speed,
    sort_forms,
    speedup_of,
)
from tsx_cli.optimize.results import FormResult, GuardVerdict, SizeFigures
from tsx_runtime.worker.forms.kinds import known_forms


def verdict(loss: float = 0.0, *, passed: bool = True) -> GuardVerdict:
    text = f"it loses {loss:.1%}"
    return GuardVerdict(
        passed=passed,
        metric="top1",
        limit="l",
        value=1 - loss,
        reference=1,
        loss=loss,
        loss_bound=loss,
        rows=9,
        text=text,
    )


def form(name: str, speedup: float, half: float = 0.02, **changes: Any) -> FormResult:
    fields = {
        "guard": verdict(),
        "batches_agree": True,
        "memory_mib": 100.0,
        "state": "passed",
        "speedup_low": speedup / (1 + half),
        "speedup_high": speedup * (1 + half),
    }
    return FormResult(name=name, label=name, speedup=speedup, **fields | changes)


def names(*forms: FormResult) -> list[str]:
    return [form.name for form in rank_forms(forms)]


def size(batch: int, ratio: float, half: float) -> SizeFigures:
    return SizeFigures(
        batch_size=batch,
        median_ms=1,
        reference_ms=ratio,
        ratio=ratio,
        low=ratio / (1 + half),
        high=ratio * (1 + half),
    )


def test_the_speedup_is_the_geometric_mean_over_batch_sizes() -> None:
    one_size = speedup_of([size(1, 2.0, 0.1)])
    assert one_size == (pytest.approx(2.0), pytest.approx(2.0 / 1.1), pytest.approx(2.2), True)
    two_sizes = speedup_of([size(1, 1.0, 0.1), size(8, 4.0, 0.1)])
    assert two_sizes.ratio == pytest.approx(2.0)
    assert one_size.low < two_sizes.low < two_sizes.ratio < two_sizes.high < one_size.high


def test_only_an_accurate_and_clearly_faster_form_may_be_chosen() -> None:
    wrong = form("wrong", 9.0, guard=verdict(0.1, passed=False))
    rows = form("rows", 9.0, batches_agree=False)
    unproven = form("unproven", 9.0, guard=None)
    noisy = form("noisy", 1.1, half=0.2)
    assert names(wrong, rows, unproven, noisy, form("sound", 1.1)) == ["sound"]


def test_forms_are_ranked_by_speed_then_loss_then_memory() -> None:
    fast = form("fast", 3.0, guard=verdict(0.003))
    assert names(form("slow", 2.0), fast) == ["fast", "slow"]
    assert same_speed(fast, near := form("near", 2.98))
    assert names(fast, near) == ["near", "fast"]
    assert names(near, small := form("small", 2.97, memory_mib=50.0)) == ["small", "near"]
    assert "fast is as fast within the noise" in describe_choice([fast, near], [1, 8])
    text = "small is 2.97 times (2.91 to 3.03) as fast as the reference over batches of 1, 8"
    assert describe_choice([small], [1, 8]).startswith(text)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (FormResult(name="a", label="a", state="failed"), "no form was measured"),
        (form("a", 3.0, guard=verdict(0.1, passed=False)), "no form is accurate enough"),
        (form("a", 1.0), "no form that is accurate enough is faster"),
    ],
)
def test_the_reference_is_kept_with_a_reason_if_no_form_is_better(
    form: FormResult, reason: str
) -> None:
    assert reason in describe_choice([form], [1])


def test_an_unproven_faster_form_is_not_called_inaccurate() -> None:
    lossy_verdict = verdict(0.002, passed=False)
    assert judge_form(lossy_verdict, 2.0) == ("inaccurate", "it loses 0.2%")
    assert judge_form(lossy_verdict.model_copy(update={"rows_needed": 900}), 2.0)[0] == "unproven"
    assert [judge_form(verdict(), low)[0] for low in (1.2, 1.0)] == ["passed", "slower"]


def test_the_choice_reports_the_rows_needed_for_the_fastest_unproven_form() -> None:
    def unproven(name: str, speedup: float, rows_needed: int) -> FormResult:
        guard = verdict(0.002, passed=False).model_copy(
            update={"rows_needed": rows_needed, "limit": "top1>=-0.5%"}
        )
        return form(name, speedup, guard=guard, state="unproven")

    fast, faster = unproven("fast", 3.0, 900), unproven("faster", 4.0, 1500)
    unproven_text = "faster is 4.00 times as fast and unproven: about 1,500 held-out rows would settle top1>=-0.5%; there are 9."
    text = describe_choice([fast, faster], [1])
    assert text == f"The reference stays: no form is proven to be accurate enough. {unproven_text}"
    assert describe_choice([fast, faster, form("best", 2.0)], [1]).endswith(unproven_text)
    assert "unproven" not in describe_choice([fast, form("best", 5.0)], [1])
    assert "many millions of held-out rows" in describe_choice([unproven("fast", 3.0, 10**9)], [1])


def test_an_unknown_form_is_tried_last() -> None:
    assert sort_forms(["later", "onnx", "openvino-int8"]) == ["openvino-int8", "onnx", "later"]
    assert set(ORDER) <= set(known_forms())


def test_only_given_forms_are_tried_and_typos_get_a_suggestion() -> None:
    assert sort_forms(["bf16", "onnx", "compile"], ["onnx", "bf16"]) == ["bf16", "onnx"]
    with pytest.raises(UsageError, match="no form 'onx'; did you mean 'onnx'"):
        sort_forms(["bf16", "onnx"], ["onx"])
