"""Admission of calls and their timeouts: the limits that gRPC's core lacks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar
from typing import Any, NamedTuple

from grpc import StatusCode

from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.grpc.statuses import CallRefused, Refusal
from tsx_runtime.settings.schema import Settings

WATCHER = "_schedule_rpc_coro"  # of grpc._cython.cygrpc: waits until the client closes the call
RETRY = (("grpc-retry-pushback-ms", "1000"), ("retry-after", "1"))


class Admission:
    """The calls of one port."""

    def __init__(self, settings: Settings, budget: ByteBudget) -> None:
        self.budget = budget
        self.limit = settings.grpc_max_concurrent_calls
        self.message_timeout = settings.grpc_message_timeout
        self.write_timeout = settings.write_timeout
        self.largest = settings.max_request_size
        self.calls: set[Call] = set()
        self._expired: set[asyncio.Task[Any]] = set()

    def check(self) -> None:
        """Raises `CallRefused` where there are as many calls as there may be."""
        if len(self.calls) >= self.limit:
            text = (
                f"{len(self.calls)} calls are in progress, as many as grpc_max_concurrent_calls"
                " allows. Try again later."
            )
            raise CallRefused(Refusal(StatusCode.RESOURCE_EXHAUSTED, text, RETRY, status=429))

    def expire(self, task: asyncio.Task[Any]) -> None:
        """End the call that runs in this task: its stream is reset, and all that gRPC holds of it
        is freed.
        """
        if not self._expired:
            asyncio.get_running_loop().call_soon(self._end_expired)
        self._expired.add(task)

    def _end_expired(self) -> None:
        expired, self._expired = self._expired, set()
        for task in asyncio.all_tasks():
            if not expired.isdisjoint(_watched(task)):
                task.cancel()
        for task in expired:
            task.cancel()


def _watched(task: asyncio.Task[Any]) -> list[Any]:
    """What a task of gRPC that waits for the end of a call refers to: among it, the task that runs
    the call.

    Python has no way to reset a stream whose client takes nothing: a status would wait behind the
    answer. gRPC's core resets it once nothing refers to the call. Both tasks refer to it, and gRPC
    has no interface to the first.
    """
    coroutine = task.get_coro()
    if getattr(coroutine, "__qualname__", "") != WATCHER:
        return []
    scopes = [
        scope for scope in gc.get_referents(coroutine) if "scope_struct" in type(scope).__name__
    ]
    return [each for each in gc.get_referents(*scopes) if isinstance(each, asyncio.Task)]


class Call:
    """The share of one call in its port's limits, from its metadata until gRPC releases it.

    The end of the task that it is made in is not the call's: an answer that is not taken is still
    in gRPC's core then. Another task of gRPC refers to the first one until the core is done as
    well, so the call ends when the first one is freed.
    """

    __slots__ = ("_admission", "_loop", "_size", "_task", "_timer")

    def __init__(self, admission: Admission) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._admission, self._size = admission, 0
        self._task = weakref.ref(task, self._end)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(admission.message_timeout, self._expire)
        admission.calls.add(self)

    @property
    def budget(self) -> ByteBudget:
        return self._admission.budget

    def arrived(self) -> None:
        """Its message is there, or its messages have a time of their own."""
        self._timer.cancel()

    def take(self, size: int) -> None:
        """Of an answer, so many bytes are to be sent.

        Raises Unavailable where there is no room for them.
        """
        self.budget.take(size)
        self._size += size

    def give(self, size: int) -> None:
        """The client has taken so many."""
        self.budget.give(size)
        self._size -= size

    def finish(self) -> None:
        """The client must take the rest now.

        Its status would wait forever behind parts of an answer that are not taken.
        """
        self._timer.cancel()
        self._timer = self._loop.call_later(self._admission.write_timeout, self._expire)

    def _expire(self) -> None:
        if (task := self._task()) is not None:
            self._admission.expire(task)

    def _end(self, _: object) -> None:
        self._timer.cancel()
        self.budget.give(self._size)
        self._admission.calls.discard(self)


class Admissions(NamedTuple):
    """Health probes and the other calls are counted separately, so that neither takes places from
    the other.
    """

    calls: Admission
    probes: Admission


current_call: ContextVar[Call] = ContextVar("current_call")
