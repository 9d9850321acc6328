"""Which of several models with latency targets on one device starts its next batch: the one that is
nearest to missing its target.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tsx_runtime.core.scheduling.channel import Channel

# of a batch of a model that nothing waits for, which would come first: how much of one is expected
# to
IDLE = 0.5
# times the longest time that a batch is expected to take, after which others no longer wait for it
LATE = 3.0
RENEW = (
    1.0  # seconds after which it is looked up again who is at work, and how many cores workers have
)
RECENT = 3.0  # seconds without a batch after which a worker is not at work

Device = int | None  # a GPU's number, or the CPU


class Claim(NamedTuple):
    """A model that has a batch to start."""

    arrived: float  # of its oldest request
    target: float  # seconds
    ahead: float  # seconds that its batch is expected to take

    @property
    def deadline(self) -> float:
        return self.arrived + self.target


def turn_order(claims: Sequence[Claim], now: float) -> list[float]:
    """The least is nearest to missing its target: that with the earliest deadline.

    The least slack (to when a batch has to start) would let long batches overtake short ones. One
    that is late in any case goes by the longest target of all: it makes no other late as well, and
    has its turn in the end.
    """
    longest = max((claim.target for claim in claims), default=0.0)
    return [
        (
            claim.deadline
            if claim.deadline - claim.ahead >= now
            else claim.arrived + max(longest, 2 * claim.target)
        )
        for claim in claims
    ]


def expected_wait(
    own: Claim, others: Iterable[Claim], idle: Iterable[Claim], caution: float
) -> float:
    """Seconds of batches that start before one that is claimed now.

    Of `others` that wait, those with an earlier deadline, and, of models for which nothing waits
    (`idle`), a part of those with a shorter target, which may come yet. With a `caution` of 1, also
    all that wait, and those with the same target.
    """
    waiting = sum(
        each.ahead * (1.0 if each.deadline < own.deadline else caution) for each in others
    )
    return waiting + sum(
        each.ahead * (max(IDLE, caution) if each.target < own.target else caution)
        for each in idle
        if each.target <= own.target
    )


class Rival(Protocol):
    """A dispatcher as others on its device see it."""

    channels: list[Channel]

    def claim(self, now: float) -> Claim | None:
        """None where nothing waits."""

    def next_batch(self, now: float) -> Claim:
        """The claim of a request that would come now."""

    @property
    def caution(self) -> float:
        """Between 0 and 1: the more accepted requests miss the target."""

    def expected_end(self, channel: Channel, now: float) -> float: ...

    def overdue(self, channel: Channel) -> float:
        """When others no longer wait for what the channel's worker runs."""

    def start(self) -> None:
        """Send a batch if there is one, and `DeviceArbiter.granted` says so."""


class DeviceArbiter:
    """Asked by the dispatchers with a target; one alone on its device, or with a core for each
    worker, is not held up.

    A GPU runs one batch at a time, the CPU as many as there are cores for their threads. It keeps
    no account of grants: what runs is read off the channels each time, so nothing is left over of
    workers that die and models that go.
    """

    def __init__(self, cores: int) -> None:
        self.held_up = False  # whether a model may wait for its turn
        self._cores = cores
        self._members: dict[Rival, None] = {}
        self._active: set[Rival] = set()
        self._crowded: set[Device] = set()
        self._renewed = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def join(self, rival: Rival) -> None:
        self._members[rival] = None
        self._renewed = -math.inf

    def leave(self, rival: Rival) -> None:
        self._members.pop(rival, None)
        self._active.discard(rival)
        self.changed()

    def changed(self) -> None:
        """Workers have come or gone, and what runs may be less."""
        self._renewed = -math.inf
        if len(self._members) > 1:
            asyncio.get_running_loop().call_soon(self.turn)

    def crowded(self, rival: Rival, now: float) -> bool:
        """Whether it shares a device with others that have been at work lately, and there is not
        room for all.
        """
        if len(self._members) < 2:
            return False
        if rival not in self._active or now - self._renewed > RENEW:
            self._renew(rival, now)
        return any(not self._crowded.isdisjoint(channel.devices) for channel in rival.channels)

    def _renew(self, rival: Rival, now: float) -> None:
        self._renewed = now
        self._active = {
            each
            for each in self._members
            if each is rival
            or each.claim(now) is not None
            or any(it.batches or now - it.replied < RECENT for it in each.channels)
        }
        self._crowded = set()
        for device in {
            device
            for each in self._active
            for channel in each.channels
            for device in channel.devices
        }:
            workers = [
                (each, channel)
                for each in self._active
                for channel in each.channels
                if device in channel.devices
            ]
            if len({each for each, _ in workers}) > 1 and sum(
                self._need(channel) for _, channel in workers
            ) > self._room(device):
                self._crowded.add(device)

    def granted(self, rival: Rival, now: float) -> Channel | None:
        """The idle worker that it may send a batch to now."""
        return self._grants(now).get(rival)

    def turn(self) -> None:
        """Something has ended: who is nearest to missing its target starts."""
        tried: set[Rival] = set()
        while todo := [rival for rival in self._grants(time.monotonic()) if rival not in tried]:
            tried.add(todo[0])
            todo[0].start()

    def outlook(self, rival: Rival, now: float) -> tuple[float, float]:
        """When a batch of a request that comes now may start at the earliest, and for how long
        others have the device after each batch.
        """
        own = rival.channels[0]
        devices, need = set(own.devices), self._need(own)
        rivals = [each for each in self._active if each is not rival]
        others = [
            each
            for each in rivals
            if any(not devices.isdisjoint(channel.devices) for channel in each.channels)
        ]
        running = [(each, channel) for each in others for channel in self._busy(each, devices, now)]
        room = self._room(own.devices[0])  # alike for all of them
        used = sum(self._need(channel) for _, channel in running)
        at_once = max(1, room // need)
        start = (
            min((each.expected_end(channel, now) for each, channel in running), default=now)
            if used + need > room
            else now
        )
        claims = {each: each.claim(now) for each in others}
        busy = {each for each, _ in running}
        waiting = [claim for claim in claims.values() if claim is not None]
        idle = [each.next_batch(now) for each, claim in claims.items() if claim is None]
        between = sum(
            each.next_batch(now).ahead
            for each, claim in claims.items()
            if claim is not None or each in busy
        )
        if not running and not waiting:
            return now, between / at_once
        caution = max(
            each.caution for each in (rival, *others)
        )  # of all: one that is cautious alone would be left with nothing
        return (
            start + expected_wait(rival.next_batch(now), waiting, idle, caution) / at_once,
            between / at_once,
        )

    def _grants(self, now: float) -> dict[Rival, Channel]:
        """In the order of `turn_order`, one batch each.

        A later one takes no room that an earlier one waits for.
        """
        members = [
            (each, claim) for each in self._members if (claim := each.claim(now)) is not None
        ]
        urgent = turn_order([claim for _, claim in members], now)
        busy = [
            channel for each in self._members for channel in self._busy(each, self._crowded, now)
        ]
        used: dict[Device, float] = {
            device: sum(self._need(channel) for channel in busy if device in channel.devices)
            for device in self._crowded
        }
        found: dict[Rival, Channel] = {}
        for _, rival in sorted(
            zip(urgent, [each for each, _ in members], strict=True), key=lambda pair: pair[0]
        ):
            idle = [channel for channel in rival.channels if not channel.batches]
            for channel in idle:
                need = self._need(channel)
                before = {
                    device: used.get(device, -math.inf) for device in channel.devices
                }  # nothing of one that is not crowded
                if all(
                    not taken or taken + need <= self._room(device)
                    for device, taken in before.items()
                ):
                    found[rival] = channel
                    used |= {device: taken + need for device, taken in before.items()}
                    break
            else:
                used |= {device: math.inf for channel in idle for device in channel.devices}
        self.held_up = len(found) < len(members)
        return found

    def _busy(self, rival: Rival, devices: set[Device], now: float) -> list[Channel]:
        """Its workers that run a batch; for one that is long overdue the others do not wait, and a
        timer runs until it is.
        """
        busy = []
        for channel in rival.channels:
            if (
                channel.batches
                and not devices.isdisjoint(channel.devices)
                and (until := rival.overdue(channel)) > now
            ):
                busy.append(channel)
                if until < self._timer_at:
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer_at = until
                    self._timer = asyncio.get_running_loop().call_later(until - now, self._on_timer)
        return busy

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.turn()

    def _room(self, device: Device) -> int:
        return self._cores if device is None else 1

    def _need(self, channel: Channel) -> int:
        return min(channel.threads or self._cores, self._cores) if None in channel.devices else 1
