"""Divides the machine's cores among the workers that are at work, of all models, as models and their load come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

IDLE = 3.0  # seconds without a request after which a worker needs no core


class SharingChannel(Protocol):
    """The part of a worker's channel that is read and told here."""

    answered: int
    threads: int
    shares_cores: bool

    @property
    def batches(self) -> int: ...

    def set_threads(self, threads: int) -> None: ...


class CoreSharing:
    """`share` is called once a second. Workers whose number of threads was configured keep it, and the others share the rest."""

    def __init__(self, cores: int, channels: Callable[[], Iterable[SharingChannel]], clock: Callable[[], float] = time.monotonic) -> None:
        """`channels`: of all workers that serve."""
        self._cores = cores
        self._channels = channels
        self._clock = clock
        self._seen: dict[SharingChannel, tuple[int, float]] = {}  # answered requests, and when it was last at work

    def share(self) -> None:
        now, seen, sharing, left = self._clock(), self._seen, [], self._cores
        self._seen = {}
        for channel in self._channels():
            answered, last = seen.get(channel, (0, now - 2 * IDLE))
            if channel.batches or channel.answered != answered:
                last = now
            self._seen[channel] = channel.answered, last
            if now - last > IDLE:
                continue
            if channel.shares_cores:
                sharing.append(channel)
            else:
                left -= channel.threads
        for channel in sharing:
            channel.set_threads(max(1, left // len(sharing)))
