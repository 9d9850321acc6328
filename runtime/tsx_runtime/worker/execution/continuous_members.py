"""The members of a continuous batch: with which requests the handler is called, and which fail.

The module makes no call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

MemberT = TypeVar("MemberT")


class Membership(Generic[MemberT]):
    """Requests that join between two calls of the handler, and leave when they are complete.

    Each call is recorded by `called` or `failed`. When a call with newcomers (requests in their
    first call) fails:

    1. A single newcomer fails, and the others are called again without it.
    2. Several newcomers wait while the others are called without them. Then they join one at a
       time, so that only the failing one fails.

    When a call without newcomers fails, its cause is unknown, and all requests in it fail. The same
    holds with `again` off, for a handler that must not be called again with the same requests.
    """

    def __init__(self, again: bool = True) -> None:
        self.members: list[MemberT] = []  # ordered by the time of joining
        self._waiting: deque[MemberT] = deque()
        self._newcomers = 0  # the number at the end of `members` since the last call
        self._single_joins = 0  # the number of first waiting requests that join one at a time
        self._is_closed = False  # No request joins the next call.
        self._again = again

    def __bool__(self) -> bool:
        return bool(self.members or self._waiting)

    def join(self, member: MemberT) -> None:
        self._waiting.append(member)

    def leave(self, member: MemberT) -> None:
        """Remove a request between two calls, if it is still here."""
        if member in self._waiting:
            if self._waiting.index(member) < self._single_joins:
                self._single_joins -= 1
            self._waiting.remove(member)
        elif member in self.members:
            self.members.remove(member)

    def next(self) -> list[MemberT]:
        """Return the requests of the next call; the list is empty only without any request."""
        is_closed, self._is_closed = self._is_closed, False
        if not (is_closed and self.members):
            count = 1 if self._single_joins else len(self._waiting)
            self._single_joins = max(0, self._single_joins - 1)
            self._newcomers = count
            self.members += [self._waiting.popleft() for _ in range(count)]
        return list(self.members)

    def called(self, over: Iterable[MemberT]) -> None:
        """Record that the call has succeeded, and remove the requests of `over`, now complete."""
        ended = list(over)
        self.members = [member for member in self.members if member not in ended]
        self._newcomers = 0

    def failed(self) -> Sequence[MemberT]:
        """Record that the call has failed, and return the requests that fail with it."""
        newcomers = self.members[len(self.members) - self._newcomers :]
        members, count, self._newcomers = self.members, self._newcomers, 0
        if not count or not self._again:
            self.members = []
            return members
        self.members = members[: len(members) - count]
        if count == 1:
            return newcomers
        self._waiting.extendleft(reversed(newcomers))
        self._single_joins += count
        self._is_closed = True
        return []
