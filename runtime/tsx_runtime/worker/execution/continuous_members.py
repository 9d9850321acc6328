"""Decides which requests a continuous batch calls the handler with, and which ones a failed call is
attributed to. Makes no call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

MemberT = TypeVar("MemberT")


class Membership(Generic[MemberT]):
    """Requests join between two calls of the handler, and leave when their answer is complete.

    Each call is recorded by `called` or `failed`. When one fails that had newcomers (requests in
    their first call):

    1. With one newcomer, that one fails, and the others are called again without it.
    2. With several, the others are first called without them; then the newcomers join one at a
       time, so that only the failing one fails.

    When a call without newcomers fails, its cause is unknown, and all requests in it fail. So they
    do where a handler must not be called again with what it was called with before (`again` is
    off).
    """

    def __init__(self, again: bool = True) -> None:
        self.members: list[MemberT] = []  # in the order in which they joined
        self._waiting: deque[MemberT] = deque()
        self._newcomers = 0  # at the end of `members`, since the last call
        self._apart = 0  # of those that wait, the first so many join one at a time
        self._without = False  # no request joins the next call
        self._again = again

    def __bool__(self) -> bool:
        return bool(self.members or self._waiting)

    def join(self, member: MemberT) -> None:
        self._waiting.append(member)

    def leave(self, member: MemberT) -> None:
        """At any time between two calls. One that is not here has left already."""
        if member in self._waiting:
            if self._waiting.index(member) < self._apart:
                self._apart -= 1
            self._waiting.remove(member)
        elif member in self.members:
            self.members.remove(member)

    def next(self) -> list[MemberT]:
        """The requests of the next call; empty only without any request."""
        without, self._without = self._without, False
        if not (without and self.members):
            count = 1 if self._apart else len(self._waiting)
            self._apart = max(0, self._apart - 1)
            self._newcomers = count
            self.members += [self._waiting.popleft() for _ in range(count)]
        return list(self.members)

    def called(self, over: Iterable[MemberT]) -> None:
        """The call has succeeded, and the answers of `over` are complete."""
        ended = list(over)
        self.members = [member for member in self.members if member not in ended]
        self._newcomers = 0

    def failed(self) -> Sequence[MemberT]:
        """The call has failed: the requests that fail with it. All others go on."""
        newcomers = self.members[len(self.members) - self._newcomers :]
        everyone, count, self._newcomers = self.members, self._newcomers, 0
        if not count or not self._again:
            self.members = []
            return everyone
        self.members = everyone[: len(everyone) - count]
        if count == 1:
            return newcomers
        self._waiting.extendleft(reversed(newcomers))
        self._apart += count
        self._without = True
        return []
