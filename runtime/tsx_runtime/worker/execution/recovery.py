"""The order in which the parts of a failed batch are tried again.

The module only decides; its callers call the handler. A batch that fails is tried again in parts,
so that a bad request does not fail the others. There are three rules:

1. First, three requests of the batch are tried one by one: the first, the middle and the last. If
   all three fail at the same location, the handler is broken, and the others are not tried.
   Therefore one or two bad requests never fail another, and a broken handler costs four calls.
2. Then the others are tried in two halves. A half that fails is halved again, until each bad
   request is tried alone.
3. A call is not started if the response timeout might end during it. A call is assumed to last as
   long as the longest one so far.

If a part of a request's response was sent already, the request is not tried again.

If a batch runs out of the device's memory, its requests are not at fault. It is cut to half its
size, and later batches are limited to that size (`Ceiling`).
"""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Sequence
from typing import NamedTuple

# If so many single requests fail at one location and no call has succeeded, the handler is broken.
MIN_EQUAL_FAILURES = 3
# the fraction of the response timeout for calls; the remainder is for sending
USABLE_TIME_FRACTION = 0.8
GROW_AFTER = 100  # batches that must fit at the ceiling before a larger one is tried
MAX_GROW_AFTER = 100_000


class FailureLocation(NamedTuple):
    """The file and line where a call failed, and the type of the error.

    Two failures with the same location count as equal, whatever their messages.
    """

    kind: str
    file: str
    line: int


def find_location(error: BaseException) -> FailureLocation:
    """Return the location of an error."""
    file, line = "", 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, line = frame.f_code.co_filename, number
    return FailureLocation(type(error).__qualname__, file, line)


def split_failed_batch(size: int, *, first: bool) -> list[list[int]]:
    """Return the parts of a failed batch, as positions, in the order in which to try them.

    Each part is smaller than the batch. The `first` batch that fails is split into three samples of
    one request, and the remainder. Any other batch is halved.
    """
    if size < 2:
        return []
    if not first:
        middle = (size + 1) // 2
        return [list(range(middle)), list(range(middle, size))]
    samples = sorted({0, size // 2, size - 1})
    remainder = [position for position in range(size) if position not in samples]
    return [[position] for position in samples] + ([remainder] if remainder else [])


class RetrySearch:
    """The search for the bad requests of a failed batch, which the handler is called with in parts.

    `next` returns a part, and `record_success`, `record_failure` or `retry` records its result.
    A position is returned until its part succeeds, or it fails as a single request, or the search
    gives up (`given_up`).
    """

    def __init__(self, ceiling: Ceiling, timeout: float) -> None:
        self.given_up: list[int] = []
        self._ceiling = ceiling
        self._timeout = timeout
        # A stack: the last part is tried first. The flag marks the remainder after the samples.
        self._pending_parts: list[tuple[list[int], bool]] = []
        self._single_failure_locations: list[Hashable] = []
        self._has_succeeded = False
        self._has_sampled = False

    def next(self, elapsed_s: float, longest_call_s: float) -> list[int]:
        """Return the next part, which is empty at the end of the search.

        The search gives up if the handler is broken, or if one more call might exceed the timeout.

        Args:
            elapsed_s: The seconds since the batch began.
            longest_call_s: The seconds of the longest call so far.
        """
        is_handler_broken = (
            not self._has_succeeded
            and len(self._single_failure_locations) >= MIN_EQUAL_FAILURES
            and len(set(self._single_failure_locations)) == 1
        )
        if is_handler_broken or elapsed_s + longest_call_s > self._timeout * USABLE_TIME_FRACTION:
            self.give_up()
        while self._pending_parts:
            positions, is_remainder = self._pending_parts.pop()
            if len(chunks := self._ceiling.split(len(positions))) > 1:
                self._push(positions, chunks)
            elif is_remainder and not self._single_failure_locations:
                # No sample failed, so a request of this part must be bad.
                self._push(positions, split_failed_batch(len(positions), first=False))
            else:
                return positions
        return []

    def give_up(self) -> None:
        self.given_up += [
            position for positions, _ in reversed(self._pending_parts) for position in positions
        ]
        self._pending_parts.clear()

    def retry(self, positions: Sequence[int]) -> None:
        """Add positions to be tried again, since they are not at fault for the failure."""
        if positions:
            self._pending_parts.append((list(positions), False))

    def record_success(self) -> None:
        """Record that the last part succeeded."""
        self._has_succeeded = True

    def record_failure(self, positions: Sequence[int], location: Hashable) -> None:
        """Record that a part failed, and split it further unless it is a single request."""
        if len(positions) == 1:
            self._single_failure_locations.append(location)
        else:
            self._push(
                positions,
                split_failed_batch(len(positions), first=not self._has_sampled),
                sampled=not self._has_sampled,
            )
            self._has_sampled = True

    def _push(
        self, positions: Sequence[int], groups: Sequence[Sequence[int]], *, sampled: bool = False
    ) -> None:
        for group in reversed(groups):
            self._pending_parts.append(
                ([positions[idx] for idx in group], sampled and len(group) > 1)
            )


class Ceiling:
    """The limit of the batch size, so that batches fit the device's memory.

    `size` is None without a limit. It grows by a quarter on trial after enough batches of that size
    have fitted. After each failed trial, ten times as many batches are needed. The limit is removed
    when a batch as large as the first failed one fits.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._first_failed_size = 0  # the size that failed before there was a limit
        self._size_before_trial: int | None = None  # None without a running trial
        self._full_batches = 0  # batches of the full size since the last change
        self._grow_after = GROW_AFTER

    def split(self, size: int) -> list[range]:
        """Split a batch into ranges of positions within the limit."""
        step = self.size or size
        return [range(start, min(start + step, size)) for start in range(0, size, step)]

    def record_failure(self, size: int) -> None:
        """Lower the limit, since a batch of `size` did not fit."""
        if self.size is None:
            self._first_failed_size = size
        if self._size_before_trial is not None and size > self._size_before_trial:
            self.size = self._size_before_trial
            self._grow_after = min(self._grow_after * 10, MAX_GROW_AFTER)
        else:
            self.size = max(1, size // 2)
        self._size_before_trial, self._full_batches = None, 0

    def record_success(self, size: int) -> bool:
        """Record that a batch of `size` fitted; return whether the limit has changed."""
        if self.size is None or size < self.size:
            return False
        if size >= self._first_failed_size:
            self.size = self._size_before_trial = None
            self._grow_after = GROW_AFTER
            return True
        self._size_before_trial = None
        self._full_batches += 1
        if self._full_batches < self._grow_after:
            return False
        self._full_batches, self._size_before_trial = 0, self.size
        self.size = min(self.size + max(1, self.size // 4), self._first_failed_size)
        return True
