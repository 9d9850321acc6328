"""Measures the steps of a handler: `preprocess`, `inference` and `postprocess`, whichever code
calls them.

Each step of a handler's object is put behind a `Step`, so that a `handle` of a user's own which
calls `self.preprocess` is seen as well as that of `BaseHandler`. Time spent in a nested step counts
for that step. The laps go to the list that was started last in this thread, or this task: one for
each batch.

On a GPU a step ends when it returns; work that it has only queued counts where its result is waited
for.
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

Laps: TypeAlias = list[
    tuple[int, float]
]  # position in STAGES, seconds; threads may add to it side by side

_laps: ContextVar[Laps | None] = ContextVar("tsx_laps", default=None)


def begin(laps: Laps | None = None) -> Laps:
    """From now on, in this thread or task, steps belong to a new batch, or to that of `laps`."""
    if laps is None:
        laps = []
    _laps.set(laps)
    return laps


def begin_next() -> Laps:
    """As `begin`, for a thread that answers batches one by one.

    An empty list serves the next batch too: setting a context variable costs more than all else
    here.
    """
    laps = _laps.get()
    return begin() if laps is None or laps else laps


def current() -> Laps | None:
    return _laps.get()


def times(began: float, done: float, laps: Sequence[tuple[int, float]]) -> bytes:
    """`wire.TIMES` of a batch, from when to when (time.monotonic()) the worker had it."""
    seconds = done - began
    if not laps:  # the quick way for most
        return _pack(began, seconds, NAN, seconds, NAN)
    return _pack(began, *totals(seconds, laps))


def totals(seconds: float, laps: Sequence[tuple[int, float]]) -> tuple[float, float, float, float]:
    """The seconds in all, and in each step."""
    if not laps:  # a handler without steps
        return seconds, NAN, seconds, NAN
    spent: list[float | None] = [None, None, None]
    for stage, lap in laps:
        spent[stage] = lap + (spent[stage] or 0.0)
    preprocess, inference, postprocess = (NAN if lap is None else lap for lap in spent)
    return seconds, preprocess, inference, postprocess


class StepTotals:
    """The seconds of all calls so far.

    A request takes part in many: its own seconds are the difference since its arrival.
    """

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0, 0.0]
        self._known = [False, False, False]

    def add(self, seconds: float, laps: Laps) -> None:
        """Of one call."""
        for stage, took in enumerate(totals(seconds, laps)[1:]):
            if took >= 0.0:  # NaN is not
                self.seconds[stage] += took
                self._known[stage] = True

    def since(self, began: float, before: Sequence[float]) -> bytes:
        """`wire.TIMES` of a request that came at `began`, when `seconds` were as they are in
        `before`.
        """
        spent = [
            now - then if known else NAN
            for now, then, known in zip(self.seconds, before, self._known, strict=True)
        ]
        return TIMES.pack(began, time.monotonic() - began, *spent)


class _Here(threading.local):
    inner = 0.0  # seconds that the steps which were called by the running one have taken


_here = _Here()


class Step:
    """A handler's method whose time is measured.

    An object, not a function, so that a handler can still be pickled.
    """

    def __init__(self, method: Callable[..., Any], stage: int) -> None:
        self._tsx_method = method
        self._tsx_stage = stage
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        laps = _laps.get()
        if laps is None:  # a thread of the handler's own, or no batch
            return self._tsx_method(*args, **kwargs)
        outer, _here.inner = _here.inner, 0.0
        start = time.perf_counter()
        try:
            return self._tsx_method(*args, **kwargs)
        finally:
            took = time.perf_counter() - start
            laps.append((self._tsx_stage, took - _here.inner))
            _here.inner = outer + took

    def __getattr__(self, name: str) -> Any:
        """As the method: `__self__`, `__func__`."""
        return getattr(self._tsx_method, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the handler has the method itself."""
        return _as_it_was, (self._tsx_method,)


def _as_it_was(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def watch(handler: Any) -> bool:
    """Measure the steps of this object, as far as they are separate methods; their behaviour stays
    the same.

    Whether there are any.
    """
    own = getattr(handler, "__dict__", None)
    if own is None:
        return False
    found = False
    for stage, name in enumerate(STAGES):
        method = getattr(handler, name, None)
        if (
            not callable(method)
            or inspect.isgeneratorfunction(method)
            or inspect.isasyncgenfunction(method)
        ):
            continue
        own[name] = (
            _awaited(method, stage) if inspect.iscoroutinefunction(method) else Step(method, stage)
        )
        found = True
    return found


def _awaited(method: Callable[..., Any], stage: int) -> Callable[..., Any]:
    """Other requests may run while it waits, so what it awaits counts for it."""

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
