"""The times of a handler's steps: `preprocess`, `inference` and `postprocess`.

Each step of a handler's object is put behind a `Step`. A user's own `handle` that calls
`self.preprocess` is therefore measured like that of `BaseHandler`. Time in a nested step counts for
that step. The laps go to the newest list of this thread or task; each batch has one.

On a GPU a step ends when it returns. Work that it has only queued counts in the step that waits for
its result.
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
_pack = TIMES.pack

# Pairs of a position in STAGES and seconds. Several threads may add to a list.
Laps: TypeAlias = list[tuple[int, float]]

_laps: ContextVar[Laps | None] = ContextVar("tsx_laps", default=None)


def begin(laps: Laps | None = None) -> Laps:
    """Begin a batch in this thread or task, or go on with the batch of `laps`."""
    if laps is None:
        laps = []
    _laps.set(laps)
    return laps


def begin_next() -> Laps:
    """Begin a batch in a thread that answers batches one by one.

    An empty list serves the next batch too: setting a context variable costs more than all else
    here.
    """
    laps = _laps.get()
    return begin() if laps is None or laps else laps


def current() -> Laps | None:
    """Return the laps of the batch of this thread or task."""
    return _laps.get()


def times(began: float, done: float, laps: Sequence[tuple[int, float]]) -> bytes:
    """Return `wire.TIMES` of a batch that the worker had between two times (time.monotonic())."""
    seconds = done - began
    if not laps:  # the quick way for most batches
        return _pack(began, seconds, NAN, seconds, NAN)
    return _pack(began, *totals(seconds, laps))


def totals(seconds: float, laps: Sequence[tuple[int, float]]) -> tuple[float, float, float, float]:
    """Return the seconds in all, and in each step."""
    if not laps:  # The handler has no steps.
        return seconds, NAN, seconds, NAN
    spent: list[float | None] = [None, None, None]
    for stage, lap in laps:
        spent[stage] = lap + (spent[stage] or 0.0)
    preprocess, inference, postprocess = (NAN if lap is None else lap for lap in spent)
    return seconds, preprocess, inference, postprocess


class StepTotals:
    """The seconds of all calls so far.

    A request takes part in many calls: its own seconds are the difference since its arrival.
    """

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0, 0.0]
        self._known = [False, False, False]

    def add(self, seconds: float, laps: Laps) -> None:
        """Add one call."""
        for stage, took in enumerate(totals(seconds, laps)[1:]):
            if took >= 0.0:  # NaN is not.
                self.seconds[stage] += took
                self._known[stage] = True

    def since(self, began: float, earlier_seconds: Sequence[float]) -> bytes:
        """Return `wire.TIMES` of a request.

        Args:
            began: The time of its arrival.
            earlier_seconds: The value of `seconds` at that time.
        """
        spent = [
            now - then if known else NAN
            for now, then, known in zip(self.seconds, earlier_seconds, self._known, strict=True)
        ]
        return TIMES.pack(began, time.monotonic() - began, *spent)


class _NestedTime(threading.local):
    inner = 0.0  # the seconds of the steps that the running one has called


_nested = _NestedTime()


class Step:
    """A handler's method whose time is measured.

    It is an object, so that a handler can still be pickled.
    """

    def __init__(self, method: Callable[..., Any], stage: int) -> None:
        self._tsx_method = method
        self._tsx_stage = stage
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        laps = _laps.get()
        if laps is None:  # It is a thread of the handler, or there is no batch.
            return self._tsx_method(*args, **kwargs)
        outer, _nested.inner = _nested.inner, 0.0
        start = time.perf_counter()
        try:
            return self._tsx_method(*args, **kwargs)
        finally:
            took = time.perf_counter() - start
            laps.append((self._tsx_stage, took - _nested.inner))
            _nested.inner = outer + took

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the method, such as `__self__` or `__func__`."""
        return getattr(self._tsx_method, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the method itself, which a copy of the handler gets."""
        return _as_it_was, (self._tsx_method,)


def _as_it_was(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def watch(handler: Any) -> bool:
    """Measure the steps of this object that are separate methods; they behave as before.

    Returns:
        Whether there are any.
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
            else Step(method, stage)
        )
        has_steps = True
    return has_steps


def _measure_coroutine(method: Callable[..., Any], stage: int) -> Callable[..., Any]:
    """Measure a coroutine, with what it awaits, since other requests may run meanwhile."""

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
