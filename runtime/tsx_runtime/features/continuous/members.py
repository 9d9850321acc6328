"""The members of a continuous batch: the requests of the next call, and those that fail with it.

The module only decides; its caller calls the handler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

MemberT = TypeVar("MemberT")


class Membership(Generic[MemberT]):
    """The requests of a continuous batch, which join and leave between two calls of the handler.

    Each call is recorded by `record_success` or `record_failure`. When a call with newcomers
    (requests in their first call) fails:

    1. A single newcomer fails, and the others are called again without it.
    2. Several newcomers wait while the others are called without them. Then they join one at a
       time, so that only the failing one fails.

    When a call without newcomers fails, its cause is unknown, and all its requests fail. They also
    all fail without `can_retry`, for handlers that must not get the same requests again.
    """

    def __init__(self, can_retry: bool = True) -> None:
        self.members: list[MemberT] = []  # ordered by the time of joining
        self._waiting: deque[MemberT] = deque()
        self._newcomer_count = 0  # how many at the end of `members` are in their first call
        self._single_join_count = 0  # how many at the front of `_waiting` must join one at a time
        self._is_closed_to_newcomers = False  # If set, no request joins the next call.
        self._can_retry = can_retry

    def __bool__(self) -> bool:
        return bool(self.members or self._waiting)

    def join(self, member: MemberT) -> None:
        self._waiting.append(member)

    def leave(self, member: MemberT) -> None:
        """Remove a request between two calls, if it is still here."""
        if member in self._waiting:
            if self._waiting.index(member) < self._single_join_count:
                self._single_join_count -= 1
            self._waiting.remove(member)
        elif member in self.members:
            self.members.remove(member)

    def next_call(self) -> list[MemberT]:
        """Let waiting requests join, and return the requests of the next call."""
        is_closed, self._is_closed_to_newcomers = self._is_closed_to_newcomers, False
        if not (is_closed and self.members):
            count = 1 if self._single_join_count else len(self._waiting)
            self._single_join_count = max(0, self._single_join_count - 1)
            self._newcomer_count = count
            self.members += [self._waiting.popleft() for _ in range(count)]
        return list(self.members)

    def record_success(self, complete_members: Iterable[MemberT]) -> None:
        """Record that the call has succeeded, and remove the requests that are now complete."""
        removed = list(complete_members)
        self.members = [member for member in self.members if member not in removed]
        self._newcomer_count = 0

    def record_failure(self) -> Sequence[MemberT]:
        """Record that the call has failed, and return the requests that fail with it."""
        newcomers = self.members[len(self.members) - self._newcomer_count :]
        members, count, self._newcomer_count = self.members, self._newcomer_count, 0
        if not count or not self._can_retry:
            self.members = []
            return members
        self.members = members[: len(members) - count]
        if count == 1:
            return newcomers
        self._waiting.extendleft(reversed(newcomers))
        self._single_join_count += count
        self._is_closed_to_newcomers = True
        return []
