"""Decides the retries after a handler has failed for a batch: which parts, in which order, and when
to stop. Makes no call.

A batch that fails is tried again in parts, so that one bad request fails no other. Three rules:

1. First three requests of the batch alone, from its start, its middle and its end: where the
   handler is broken, all fail alike, and the rest is not tried at all. So one or two bad requests
   never fail another; and a broken handler costs four calls.
2. Then the others, in halves, and failing halves in halves again, until the bad requests are alone.
3. No call is started that, lasting as long as the longest so far, might end after the batch's time.

A request whose answer has begun, by a part that was sent, is not tried again.

A batch that ran out of the device's memory is not at fault: it is cut to half its size, and so are
later ones (`Ceiling`).
"""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Sequence
from typing import NamedTuple

ALIKE = 3  # requests alone that fail alike, before one has succeeded: the handler fails, not they
TIME_SHARE = 0.8  # of the response timeout: the rest is for sending the answer
GROW_AFTER = 100  # batches at the ceiling before a larger one is tried
GROW_AFTER_MOST = 100_000


class Place(NamedTuple):
    """Where a call failed, and with which type: two failures of the same place are equal, whatever
    their messages.
    """

    kind: str
    file: str
    line: int


def place_of(error: BaseException) -> Place:
    file, line = "", 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, line = frame.f_code.co_filename, number
    return Place(type(error).__qualname__, file, line)


def parts(size: int, *, first: bool) -> list[list[int]]:
    """The parts of a batch that failed, as positions in it, in the order in which to try them; each
    is smaller than the batch.

    The `first` batch that fails is sampled, and what is left of it is one part, the last; any other
    is halved.
    """
    if size < 2:
        return []
    if not first:
        middle = (size + 1) // 2
        return [list(range(middle)), list(range(middle, size))]
    samples = sorted({0, size // 2, size - 1})
    rest = [position for position in range(size) if position not in samples]
    return [[position] for position in samples] + ([rest] if rest else [])


class Search:
    """Which parts of a batch that failed to call the handler with, one after the other.

    `next` returns it, and `succeeded`, `failed` or `again` records its result. Each position is
    returned again until it was in a part that succeeded, or failed alone, or is in `given_up`.
    """

    def __init__(self, ceiling: Ceiling, timeout: float) -> None:
        self.given_up: list[int] = []
        self._ceiling = ceiling
        self._timeout = timeout
        self._todo: list[
            tuple[list[int], bool]
        ] = []  # the last comes first; the flag marks what the samples left
        self._alone: list[Hashable] = []
        self._succeeded = False
        self._sampled = False

    def next(self, used: float, longest: float) -> list[int]:
        """Empty when nothing is left to try, or nothing may be.

        Gives up where the handler is at fault, as so many single requests have failed at the same
        place, or where one more call would not fit the time of a batch.
        """
        all_fail = not self._succeeded and len(self._alone) >= ALIKE and len(set(self._alone)) == 1
        if all_fail or used + longest > self._timeout * TIME_SHARE:
            self.give_up()
        while self._todo:
            positions, rest = self._todo.pop()
            if len(cut := self._ceiling.cut(len(positions))) > 1:
                self._push(positions, cut)
            elif rest and not self._alone:  # no sample failed, so this part does
                self._push(positions, parts(len(positions), first=False))
            else:
                return positions
        return []

    def give_up(self) -> None:
        self.given_up += [
            position for positions, _ in reversed(self._todo) for position in positions
        ]
        self._todo.clear()

    def again(self, positions: Sequence[int]) -> None:
        """Try them again: they failed for a reason that is not their own."""
        if positions:
            self._todo.append((list(positions), False))

    def succeeded(self) -> None:
        self._succeeded = True

    def failed(self, positions: Sequence[int], where: Hashable) -> None:
        if len(positions) == 1:
            self._alone.append(where)
        else:
            self._push(
                positions, parts(len(positions), first=not self._sampled), sampled=not self._sampled
            )
            self._sampled = True

    def _push(
        self, positions: Sequence[int], groups: Sequence[Sequence[int]], *, sampled: bool = False
    ) -> None:
        for group in reversed(groups):
            self._todo.append(([positions[idx] for idx in group], sampled and len(group) > 1))


class Ceiling:
    """The largest batch that fits the device's memory, as far as is known: `size`, or None where
    any does.

    It grows again, by a quarter at a time, once enough batches of its size have run; after each
    trial that failed, ten times as many are needed. It is removed when a batch as large as the
    first failed one fits.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._first = 0  # the size that failed while no ceiling held
        self._good: int | None = None  # during a trial, the size that it began from
        self._full = 0  # batches since the last change that were as large as it
        self._grow_after = GROW_AFTER

    def cut(self, size: int) -> list[range]:
        """The positions of a batch in parts that fit."""
        step = self.size or size
        return [range(start, min(start + step, size)) for start in range(0, size, step)]

    def failed(self, size: int) -> None:
        """A batch of `size` did not fit."""
        if self.size is None:
            self._first = size
        if self._good is not None and size > self._good:
            self.size = self._good
            self._grow_after = min(self._grow_after * 10, GROW_AFTER_MOST)
        else:
            self.size = max(1, size // 2)
        self._good, self._full = None, 0

    def fitted(self, size: int) -> bool:
        """A batch of `size` has run. Whether the ceiling has changed."""
        if self.size is None or size < self.size:
            return False
        if size >= self._first:
            self.size = self._good = None
            self._grow_after = GROW_AFTER
            return True
        self._good = None
        self._full += 1
        if self._full < self._grow_after:
            return False
        self._full, self._good = 0, self.size
        self.size = min(self.size + max(1, self.size // 4), self._first)
        return True
