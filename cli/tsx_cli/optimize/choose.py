"""The order in which forms are tried, and the choice of the best form, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tsx_cli.bench.load.statistics import RatioInterval
from tsx_cli.common.failure import UsageError
from tsx_cli.optimize.results import (
    MAX_FEASIBLE_ROWS,
    FormResult,
    FormState,
    GuardVerdict,
    SizeFigures,
)
from tsx_runtime.shared.suggestions import suggestion

# Forms with the largest gain per build time come first, in case the time limit ends the run early.
ORDER = (
    "tensorrt-fp16",
    "neuron-bf16",
    "openvino-int8",
    "bf16",
    "fp16",
    "channels-last",
    "openvino-bf16",
    "onnx",
    "openvino",
    "int8-static-bf16",
    "int8-static",
    "aotinductor-bf16",
    "aotinductor-fp16",
    "cuda-graphs",
    "tensorrt",
    "neuron",
    "onnx-int8",
    "torchscript-bf16",
    "compile-bf16",
    "bf16-autocast",
    "fp16-autocast",
    "aotinductor",
    "torchscript",
    "compile",
    "int8-dynamic",
    "int4-weights",
    "pruned-25",
    "pruned-50",
)


def sort_forms(known: Sequence[str], requested: Sequence[str] = ()) -> list[str]:
    """Return all forms, or those of --forms, sorted by ORDER; forms without a rank are last.

    Raises:
        UsageError: --forms contains an unknown form.
    """
    for name in requested:
        if name not in known:
            raise UsageError(
                f"--forms: there is no form '{name}'{suggestion(name, known) or '.'} There are"
                f" {', '.join(known)}"
            )
    return sorted(
        requested or known, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)
    )


def speedup_of(sizes: Sequence[SizeFigures]) -> RatioInterval:
    """Return the geometric mean of the ratios with its 95 % interval.

    The sizes were measured one after the other, so their errors are independent.
    """
    mean_log = math.fsum(math.log(size.ratio) for size in sizes) / len(sizes)
    half_widths = [
        math.log(size.high / size.ratio) if math.isfinite(size.high) else math.inf for size in sizes
    ]
    half_width = math.hypot(*half_widths) / len(sizes)
    return RatioInterval(
        math.exp(mean_log),
        math.exp(mean_log - half_width),
        math.exp(min(mean_log + half_width, 700.0)),
        abs(mean_log) > half_width,
    )


def judge_form(guard: GuardVerdict, speedup_low: float) -> tuple[FormState, str]:
    """Return the state of a measured form, and the reason."""
    if not guard.passed:
        return "inaccurate" if guard.rows_needed is None else "unproven", guard.text
    return (
        ("passed", "")
        if speedup_low > 1
        else ("slower", "it is not faster than the reference beyond the noise")
    )


def rank_forms(forms: Iterable[FormResult]) -> list[FormResult]:
    """Return the forms that are accurate and faster beyond the noise, the best first.

    Of forms that are equally fast within the noise, the one with the smaller loss comes first, then
    the one with less memory.
    """
    remaining = [form for form in forms if is_better(form)]
    ranking: list[FormResult] = []
    while remaining:
        fastest = max(remaining, key=lambda form: form.speedup or 0.0)
        tied_forms = [form for form in remaining if same_speed(form, fastest)]
        best = min(
            tied_forms,
            key=lambda form: (_loss(form), form.memory_mib or math.inf, -(form.speedup or 0.0)),
        )
        ranking.append(best)
        remaining.remove(best)
    return ranking


def is_better(form: FormResult) -> bool:
    return (
        form.guard is not None
        and form.guard.passed
        and form.batches_agree is True
        and (form.speedup_low or 0.0) > 1
    )


def same_speed(first: FormResult, second: FormResult) -> bool:
    """Tell whether the difference between two forms is within their noise."""
    return abs(_log(first.speedup) - _log(second.speedup)) <= math.hypot(
        _half_width(first), _half_width(second)
    )


def _half_width(form: FormResult) -> float:
    """Return half the width of the interval of the speedup's logarithm."""
    return _log(form.speedup_high) - _log(form.speedup)


def _log(value: float | None) -> float:
    return math.log(value or 1.0)


def _loss(form: FormResult) -> float:
    return 0.0 if form.guard is None else form.guard.loss


def describe_choice(forms: Sequence[FormResult], batch_sizes: Sequence[int]) -> str:
    """Describe the choice in a few sentences."""
    best = next(iter(rank_forms(forms)), None)
    if best is None:
        return f"{_no_choice(forms)}{_rows_advice(forms, 1.0)}"
    assert best.guard is not None
    sizes = ", ".join(map(str, batch_sizes))
    speed = (
        f"{best.speedup:.2f} times ({best.speedup_low:.2f} to {best.speedup_high:.2f}) as fast as"
        " the reference"
    )
    sentence = f"{best.name} is {speed} over batches of {sizes}, and {best.guard.text}"
    faster_names = [
        form.name for form in rank_forms(forms)[1:] if (form.speedup or 0) > (best.speedup or 0)
    ]
    tie_text = (
        f" {' and '.join(faster_names)} is as fast within the noise, and loses or takes more."
        if faster_names
        else ""
    )
    return f"{sentence.rstrip('.')}.{tie_text}{_rows_advice(forms, best.speedup or 1.0)}"


def _no_choice(forms: Sequence[FormResult]) -> str:
    tried = [form for form in forms if form.speedup is not None]
    if not tried:
        return "The reference stays: no form was measured."
    if any(form.guard is not None and form.guard.passed for form in tried):
        return (
            "The reference stays: no form that is accurate enough is faster than it beyond the"
            " noise."
        )
    proven = "proven to be " if any(form.state == "unproven" for form in tried) else ""
    return f"The reference stays: no form is {proven}accurate enough."


def _rows_advice(forms: Sequence[FormResult], speed: float) -> str:
    """Describe how many rows would prove the fastest unproven form that exceeds `speed`."""
    unproven = [
        (form.speedup or 0.0, form.name, form.guard)
        for form in forms
        if form.state == "unproven"
        and (form.speedup_low or 0.0) > speed
        and form.guard is not None
        and form.guard.rows_needed is not None
    ]
    if not unproven:
        return ""
    ratio, name, guard = max(unproven, key=lambda entry: entry[0])
    rows = (
        f"about {guard.rows_needed:,}"
        if (guard.rows_needed or 0) < MAX_FEASIBLE_ROWS
        else "many millions of"
    )
    return (
        f" {name} is {ratio:.2f} times as fast and unproven: {rows} held-out rows would settle"
        f" {guard.limit}; there are {guard.rows:,}."
    )
