"""The retries after a handler has failed for a batch: which parts, in which order, how long.

The module makes no call. A batch that fails is tried again in parts, so that a bad request fails no
other. There are three rules:

1. First, three requests of the batch are tried alone, from its start, its middle and its end. If
   the handler is broken, all fail alike, and the others are not tried. One or two bad requests
   therefore never fail another, and a broken handler costs four calls.
2. Then the others are tried in halves, and failing halves in halves again, until the bad requests
   are alone.
3. No call is started that, if it lasts as long as the longest one, might exceed the batch's time.

A request whose response has begun, by a part that was sent, is not tried again.

A batch that ran out of the device's memory is not at fault. It is cut to half its size, and so are
later ones (`Ceiling`).
"""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Sequence
from typing import NamedTuple

# So many requests alone that fail alike, before one has succeeded, show that the handler fails.
MIN_ALIKE = 3
TIME_SHARE = 0.8  # the usable share of the response timeout; the remainder is for sending
GROW_AFTER = 100  # batches at the ceiling before a larger one is tried
MAX_GROW_AFTER = 100_000


class FailureLocation(NamedTuple):
    """Where a call failed, and with which type.

    Two failures at the same location are equal, whatever their messages.
    """

    kind: str
    file: str
    line: int


def location_of(error: BaseException) -> FailureLocation:
    """Return the location of an error."""
    file, line = "", 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, line = frame.f_code.co_filename, number
    return FailureLocation(type(error).__qualname__, file, line)


def parts(size: int, *, first: bool) -> list[list[int]]:
    """Return the parts of a batch that failed, as positions, in the order in which to try them.

    Each part is smaller than the batch. The `first` batch that fails is sampled, and its remainder
    is the last part. Any other batch is halved.
    """
    if size < 2:
        return []
    if not first:
        middle = (size + 1) // 2
        return [list(range(middle)), list(range(middle, size))]
    samples = sorted({0, size // 2, size - 1})
    remainder = [position for position in range(size) if position not in samples]
    return [[position] for position in samples] + ([remainder] if remainder else [])


class Search:
    """The parts of a failed batch with which the handler is called, one after the other.

    `next` returns a part, and `succeeded`, `failed` or `again` records its result. A position is
    returned until its part succeeds, it fails alone, or it is in `given_up`.
    """

    def __init__(self, ceiling: Ceiling, timeout: float) -> None:
        self.given_up: list[int] = []
        self._ceiling = ceiling
        self._timeout = timeout
        # The last one comes first. The flag marks the remainder after the samples.
        self._todo: list[tuple[list[int], bool]] = []
        self._single_failures: list[Hashable] = []
        self._succeeded = False
        self._sampled = False

    def next(self, used: float, longest: float) -> list[int]:
        """Return the next part; it is empty when nothing may be tried any more.

        The search gives up if the handler is at fault, since so many single requests have failed at
        the same location. It also gives up if one more call would not fit the batch's time.
        """
        all_fail = (
            not self._succeeded
            and len(self._single_failures) >= MIN_ALIKE
            and len(set(self._single_failures)) == 1
        )
        if all_fail or used + longest > self._timeout * TIME_SHARE:
            self.give_up()
        while self._todo:
            positions, is_remainder = self._todo.pop()
            if len(cut := self._ceiling.cut(len(positions))) > 1:
                self._push(positions, cut)
            elif is_remainder and not self._single_failures:  # No sample failed, so this part does.
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
        """Try positions again that failed for a reason outside them."""
        if positions:
            self._todo.append((list(positions), False))

    def succeeded(self) -> None:
        """Record that the last part succeeded."""
        self._succeeded = True

    def failed(self, positions: Sequence[int], location: Hashable) -> None:
        """Record that a part failed."""
        if len(positions) == 1:
            self._single_failures.append(location)
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
    """The largest batch that is known to fit the device's memory.

    `size` is None if any batch fits. It grows again by a quarter, once enough batches of its size
    have run. After each failed trial, ten times as many are needed. It is removed when a batch as
    large as the first failed one fits.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._first = 0  # the size that failed without a ceiling
        self._good: int | None = None  # the size before the present trial
        self._full = 0  # batches of the full size since the last change
        self._grow_after = GROW_AFTER

    def cut(self, size: int) -> list[range]:
        """Return the positions of a batch in parts that fit."""
        step = self.size or size
        return [range(start, min(start + step, size)) for start in range(0, size, step)]

    def failed(self, size: int) -> None:
        """Lower the ceiling, since a batch of `size` did not fit."""
        if self.size is None:
            self._first = size
        if self._good is not None and size > self._good:
            self.size = self._good
            self._grow_after = min(self._grow_after * 10, MAX_GROW_AFTER)
        else:
            self.size = max(1, size // 2)
        self._good, self._full = None, 0

    def fitted(self, size: int) -> bool:
        """Note that a batch of `size` has run; tell whether the ceiling has changed."""
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
