"""The times of a handler's steps: `preprocess`, `inference` and `postprocess`.

Each step of a handler's object is replaced by a `MeasuredStep`. Therefore the steps are also
measured if a user's own `handle` calls them. If a step calls another one, the time of the inner
step counts only for that one. Each batch has a list of laps, which is the newest list of its thread
or task.

On a GPU, a step ends when its method returns. Work that it has only queued counts for the step that
waits for the result.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

from tsx_runtime.wire import TIMES

STAGES = ("preprocess", "inference", "postprocess")
NAN = float("nan")
_pack_times = TIMES.pack

# Pairs of an index in STAGES and seconds. Several threads may add to one list.
Laps: TypeAlias = list[tuple[int, float]]

_laps: ContextVar[Laps | None] = ContextVar("tsx_laps", default=None)


def begin(laps: Laps | None = None) -> Laps:
    """Begin a batch in this thread or task, or continue the batch that has these laps."""
    if laps is None:
        laps = []
    _laps.set(laps)
    return laps


def begin_next() -> Laps:
    """Begin a batch in a thread that answers batches one by one.

    An empty list is reused for the next batch, since setting a context variable is the largest cost
    here.
    """
    laps = _laps.get()
    return begin() if laps is None or laps else laps


def current_laps() -> Laps | None:
    """Return the laps of the current batch of this thread or task."""
    return _laps.get()


def encode_times(start: float, end: float, laps: Sequence[tuple[int, float]]) -> bytes:
    """Encode the times of a batch as `wire.TIMES`; `start` and `end` are `time.monotonic()`."""
    seconds = end - start
    if not laps:  # a quick path for most batches
        return _pack_times(start, seconds, NAN, seconds, NAN)
    return _pack_times(start, *sum_steps(seconds, laps))


def sum_steps(
    seconds: float, laps: Sequence[tuple[int, float]]
) -> tuple[float, float, float, float]:
    """Return the seconds of the batch and of each step, NaN for a step that was not called."""
    if not laps:  # The handler has no steps.
        return seconds, NAN, seconds, NAN
    step_seconds: list[float | None] = [None, None, None]
    for stage, lap in laps:
        step_seconds[stage] = lap + (step_seconds[stage] or 0.0)
    preprocess, inference, postprocess = (NAN if lap is None else lap for lap in step_seconds)
    return seconds, preprocess, inference, postprocess


class StepTotals:
    """The total seconds of each step over all calls.

    In continuous batching, a request takes part in many calls. Its times are the difference between
    the totals at its end and at its arrival.
    """

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0, 0.0]
        self._is_measured = [False, False, False]

    def add(self, seconds: float, laps: Laps) -> None:
        """Add one call."""
        for stage, duration in enumerate(sum_steps(seconds, laps)[1:]):
            if duration >= 0.0:  # False for NaN.
                self.seconds[stage] += duration
                self._is_measured[stage] = True

    def encode_times_since(self, arrived_at: float, earlier_seconds: Sequence[float]) -> bytes:
        """Encode the times of a request as `wire.TIMES`.

        Args:
            arrived_at: The time of its arrival, as `time.monotonic()`.
            earlier_seconds: The value of `seconds` at that time.
        """
        step_seconds = [
            total - earlier_total if is_measured else NAN
            for total, earlier_total, is_measured in zip(
                self.seconds, earlier_seconds, self._is_measured, strict=True
            )
        ]
        return TIMES.pack(arrived_at, time.monotonic() - arrived_at, *step_seconds)


class _NestedTime(threading.local):
    inner = 0.0  # seconds in steps that the running step has called


_nested_time = _NestedTime()


class MeasuredStep:
    """A step of a handler, which measures the time of the original method.

    It is an object rather than a closure, so that the handler can still be pickled.
    """

    def __init__(self, method: Callable[..., Any], stage: int) -> None:
        self._tsx_method = method
        self._tsx_stage = stage
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        laps = _laps.get()
        if laps is None:  # This is a thread of the handler, or no batch is running.
            return self._tsx_method(*args, **kwargs)
        outer_nested_s, _nested_time.inner = _nested_time.inner, 0.0
        start = time.perf_counter()
        try:
            return self._tsx_method(*args, **kwargs)
        finally:
            duration = time.perf_counter() - start
            laps.append((self._tsx_stage, duration - _nested_time.inner))
            _nested_time.inner = outer_nested_s + duration

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the method, such as `__self__` or `__func__`."""
        return getattr(self._tsx_method, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the original method, so that a copy of the handler is not measured."""
        return _return_method, (self._tsx_method,)


def _return_method(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def measure_steps(handler: Any) -> bool:
    """Measure each step that this handler has as a method.

    Returns:
        Whether it has any.
    """
    attributes = getattr(handler, "__dict__", None)
    if attributes is None:
        return False
    has_steps = False
    for stage, name in enumerate(STAGES):
        method = getattr(handler, name, None)
        if (
            not callable(method)
            or inspect.isgeneratorfunction(method)
            or inspect.isasyncgenfunction(method)
        ):
            continue
        attributes[name] = (
            _measure_coroutine(method, stage)
            if inspect.iscoroutinefunction(method)
            else MeasuredStep(method, stage)
        )
        has_steps = True
    return has_steps


def _measure_coroutine(method: Callable[..., Any], stage: int) -> Callable[..., Any]:
    """Measure a coroutine, including the time in which it waits and other requests run."""

    @functools.wraps(method)
    async def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return await method(*args, **kwargs)
        finally:
            laps = _laps.get()
            if laps is not None:
                laps.append((stage, time.perf_counter() - start))

    return run
