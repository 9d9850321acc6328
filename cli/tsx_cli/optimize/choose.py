"""Which forms are tried first, and which of them is the best. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tsx_cli.bench.load.statistics import RatioInterval
from tsx_cli.common.failure import UsageError
from tsx_cli.optimize.results import MANY, FormResult, FormState, GuardVerdict, SizeFigures
from tsx_runtime.shared.suggestions import suggestion

# The forms that gained most for the time that building them takes come first, in case the time
# limit ends the run.
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


def in_order(known: Sequence[str], wanted: Sequence[str] = ()) -> list[str]:
    """All forms, or those of --forms, by ORDER; unknown ones last. Raises UsageError."""
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"--forms: there is no form '{name}'{suggestion(name, known) or '.'} There are"
                f" {', '.join(known)}"
            )
    return sorted(
        wanted or known, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)
    )


def speedup_of(sizes: Sequence[SizeFigures]) -> RatioInterval:
    """The geometric mean of the ratios, with its 95 % interval: the sizes were measured one after
    the other.
    """
    middle = math.fsum(math.log(each.ratio) for each in sizes) / len(sizes)
    halves = [
        math.log(each.high / each.ratio) if math.isfinite(each.high) else math.inf for each in sizes
    ]
    half = math.hypot(*halves) / len(sizes)
    return RatioInterval(
        math.exp(middle),
        math.exp(middle - half),
        math.exp(min(middle + half, 700.0)),
        abs(middle) > half,
    )


def judged(guard: GuardVerdict, speedup_low: float) -> tuple[FormState, str]:
    """The state of a form that was measured, and the reason."""
    if not guard.passed:
        return "inaccurate" if guard.rows_needed is None else "unproven", guard.text
    return (
        ("passed", "")
        if speedup_low > 1
        else ("slower", "it is not faster than the reference beyond the noise")
    )


def ranked(forms: Iterable[FormResult]) -> list[FormResult]:
    """The forms that answer right and are faster beyond the noise, the best first.

    Of forms that are equally fast within the noise, the one
    with the smaller loss is first, then the one with less memory.
    """
    left = [form for form in forms if is_better(form)]
    found: list[FormResult] = []
    while left:
        fastest = max(left, key=lambda form: form.speedup or 0.0)
        tied = [form for form in left if same_speed(form, fastest)]
        best = min(
            tied,
            key=lambda form: (_loss(form), form.memory_mib or math.inf, -(form.speedup or 0.0)),
        )
        found.append(best)
        left.remove(best)
    return found


def is_better(form: FormResult) -> bool:
    return (
        form.guard is not None
        and form.guard.passed
        and form.batches_agree is True
        and (form.speedup_low or 0.0) > 1
    )


def same_speed(one: FormResult, other: FormResult) -> bool:
    """Whether the difference is within the noise of both."""
    return abs(_log(one.speedup) - _log(other.speedup)) <= math.hypot(_half(one), _half(other))


def _half(form: FormResult) -> float:
    """Half the interval of the logarithm."""
    return _log(form.speedup_high) - _log(form.speedup)


def _log(value: float | None) -> float:
    return math.log(value or 1.0)


def _loss(form: FormResult) -> float:
    return 0.0 if form.guard is None else form.guard.loss


def describe_choice(forms: Sequence[FormResult], batch_sizes: Sequence[int]) -> str:
    """The choice in a few sentences."""
    best = next(iter(ranked(forms)), None)
    if best is None:
        return f"{_no_choice(forms)}{_more_rows(forms, 1.0)}"
    assert best.guard is not None
    sizes = ", ".join(map(str, batch_sizes))
    speed = (
        f"{best.speedup:.2f} times ({best.speedup_low:.2f} to {best.speedup_high:.2f}) as fast as"
        " the reference"
    )
    found = f"{best.name} is {speed} over batches of {sizes}, and {best.guard.text}"
    faster = [form.name for form in ranked(forms)[1:] if (form.speedup or 0) > (best.speedup or 0)]
    tied = (
        f" {' and '.join(faster)} is as fast within the noise, and loses or takes more."
        if faster
        else ""
    )
    return f"{found.rstrip('.')}.{tied}{_more_rows(forms, best.speedup or 1.0)}"


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


def _more_rows(forms: Sequence[FormResult], speed: float) -> str:
    """What would prove the fastest of the unproven forms, if it is faster than that."""
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
    ratio, name, guard = max(unproven, key=lambda each: each[0])
    rows = f"about {guard.rows_needed:,}" if (guard.rows_needed or 0) < MANY else "many millions of"
    return (
        f" {name} is {ratio:.2f} times as fast and unproven: {rows} held-out rows would settle"
        f" {guard.limit}; there are {guard.rows:,}."
    )
