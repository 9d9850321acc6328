"""Limits of gRPC calls that gRPC's core lacks: the number of calls, and timeouts."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextvars import ContextVar
from typing import Any, NamedTuple

from grpc import StatusCode

from tsx_runtime.core.scheduling.byte_budget import ByteBudget
from tsx_runtime.features.grpc.settings import GrpcSettings
from tsx_runtime.features.grpc.statuses import CallRefused, Refusal
from tsx_runtime.settings.schema import Settings

WATCHER_NAME = (
    "_schedule_rpc_coro"  # the coroutine of grpc._cython.cygrpc that waits for a call's end
)
RETRY_METADATA = (("grpc-retry-pushback-ms", "1000"), ("retry-after", "1"))


class Admission:
    """The calls in progress of one kind on a port, with their limits."""

    def __init__(self, settings: Settings, budget: ByteBudget) -> None:
        self.budget = budget
        limits = GrpcSettings.of(settings)
        self.limit = limits.grpc_max_concurrent_calls
        self.message_timeout = limits.grpc_message_timeout
        self.write_timeout = settings.write_timeout
        self.max_message_size = settings.max_request_size
        self.calls: set[Call] = set()
        self._expired: set[asyncio.Task[Any]] = set()

    def check(self) -> None:
        """Check that another call may begin.

        Raises:
            CallRefused: The limit of concurrent calls is reached.
        """
        if len(self.calls) >= self.limit:
            text = (
                f"{len(self.calls)} calls are in progress, as many as grpc_max_concurrent_calls"
                " allows. Try again later."
            )
            raise CallRefused(
                Refusal(StatusCode.RESOURCE_EXHAUSTED, text, RETRY_METADATA, status=429)
            )

    def expire(self, task: asyncio.Task[Any]) -> None:
        """End the call of a task: gRPC resets its stream and frees its memory."""
        if not self._expired:
            asyncio.get_running_loop().call_soon(self._end_expired)
        self._expired.add(task)

    def _end_expired(self) -> None:
        expired, self._expired = self._expired, set()
        for task in asyncio.all_tasks():
            if not expired.isdisjoint(_watched_tasks(task)):
                task.cancel()
        for task in expired:
            task.cancel()


def _watched_tasks(task: asyncio.Task[Any]) -> list[Any]:
    """Return the tasks that a gRPC task waits for, if it waits for a call's end.

    One of them runs the call. If a client reads nothing, a status would wait behind the unread
    response, so Python cannot end the stream. gRPC's core resets the stream once nothing refers to
    the call. The waiting task also refers to it, but gRPC has no function that returns this task.
    """
    coroutine = task.get_coro()
    if getattr(coroutine, "__qualname__", "") != WATCHER_NAME:
        return []
    scopes = [
        scope for scope in gc.get_referents(coroutine) if "scope_struct" in type(scope).__name__
    ]
    return [
        referent for referent in gc.get_referents(*scopes) if isinstance(referent, asyncio.Task)
    ]


class Call:
    """A call that counts against its port's limits until gRPC releases it.

    The call may outlive the task that runs it, because gRPC's core still holds a response that the
    client has not read. Until then, another gRPC task refers to the finished task. The call has
    therefore ended once the finished task is freed.
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

    def stop_message_timeout(self) -> None:
        """Stop the timeout for the first message; it does not apply to a stream's further ones."""
        self._timer.cancel()

    def take(self, size: int) -> None:
        """Count bytes of a response as sent but not read.

        Raises:
            Unavailable: The budget has no room for them.
        """
        self.budget.take(size)
        self._size += size

    def give(self, size: int) -> None:
        """Count bytes of a response as read by the client."""
        self.budget.give(size)
        self._size -= size

    def start_read_timeout(self) -> None:
        """Start the timeout for reading the response.

        The status would wait forever behind a response that the client does not read.
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
    """Separate limits for health probes and other calls, so that neither blocks the other."""

    calls: Admission
    probes: Admission


current_call: ContextVar[Call] = ContextVar("current_call")
