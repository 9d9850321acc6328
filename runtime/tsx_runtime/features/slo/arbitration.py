"""The order in which models with latency targets on one device start their next batches."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tsx_runtime.core.scheduling.channel import Channel

# The fraction of a batch that is expected of a model without waiting requests, if its batch would
# start first.
IDLE_SHARE = 0.5
# Other models wait for a batch for at most this multiple of its longest expected duration.
OVERDUE_FACTOR = 3.0
RENEW_S = 1.0  # time after which active models and their needs are determined again
RECENT_S = 3.0  # A model is active for this time after its last batch.

Device = int | None  # a GPU's number, or the CPU


class Claim(NamedTuple):
    """A model's wish to start a batch."""

    arrived: float  # arrival of its oldest request
    target: float  # seconds
    duration: float  # expected seconds of its batch

    @property
    def deadline(self) -> float:
        return self.arrived + self.target


def turn_order(claims: Sequence[Claim], now: float) -> list[float]:
    """Return a sort key for each claim: the smallest one starts first.

    The key is the deadline. (With the latest possible start as the key, long batches would overtake
    short ones.) A claim that will be late in any case is sorted as if it had the longest target.
    Thus it delays no model that can be in time, but still starts at some time.
    """
    longest = max((claim.target for claim in claims), default=0.0)
    return [
        (
            claim.deadline
            if claim.deadline - claim.duration >= now
            else claim.arrived + max(longest, 2 * claim.target)
        )
        for claim in claims
    ]


def expected_wait(
    claim: Claim, competing: Iterable[Claim], idle: Iterable[Claim], caution: float
) -> float:
    """Return the seconds of all batches that start before a batch that is claimed now.

    Args:
        claim: The claim of this model.
        competing: The claims of models with waiting requests. Those with earlier deadlines count.
        idle: The claims of models without them. Those with shorter targets count in part.
        caution: The fraction, from 0 to 1, by which all other claims count as well.
    """
    waiting = sum(
        rival.duration * (1.0 if rival.deadline < claim.deadline else caution)
        for rival in competing
    )
    return waiting + sum(
        rival.duration * (max(IDLE_SHARE, caution) if rival.target < claim.target else caution)
        for rival in idle
        if rival.target <= claim.target
    )


class Rival(Protocol):
    """The part of a dispatcher that other models on its device use."""

    channels: list[Channel]

    def claim(self, now: float) -> Claim | None:
        """Return the claim of the waiting requests, or None."""

    def next_batch(self, now: float) -> Claim:
        """Return the claim of a request that would arrive now."""

    @property
    def caution(self) -> float:
        """A value from 0 to 1 that grows with the fraction of missed targets."""

    def expected_end(self, channel: Channel, now: float) -> float:
        """Return when the channel's worker is expected to be free."""

    def overdue(self, channel: Channel) -> float:
        """Return the time after which other dispatchers no longer wait for the channel's worker."""

    def start(self) -> None:
        """Send a batch, if there is one and `DeviceArbiter.granted` permits it."""


class DeviceArbiter:
    """Divides devices among dispatchers with latency targets.

    A GPU runs one batch at a time. The CPU runs as many as there are cores for their threads. A
    dispatcher without a rival, or with a core for each worker, never waits. Running batches are
    read from the channels each time, so that lost workers and removed models need no clean-up.
    """

    def __init__(self, cores: int) -> None:
        self.is_blocking = False  # whether a model waits for its turn
        self._cores = cores
        self._members: dict[Rival, None] = {}
        self._active: set[Rival] = set()
        self._crowded_devices: set[Device] = set()
        self._renewed_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def join(self, rival: Rival) -> None:
        self._members[rival] = None
        self._renewed_at = -math.inf

    def leave(self, rival: Rival) -> None:
        self._members.pop(rival, None)
        self._active.discard(rival)
        self.notify_change()

    def notify_change(self) -> None:
        """React to a changed set of workers, which may permit another batch."""
        self._renewed_at = -math.inf
        if len(self._members) > 1:
            asyncio.get_running_loop().call_soon(self.start_next)

    def is_crowded(self, rival: Rival, now: float) -> bool:
        """Tell whether a dispatcher shares a device that is too small for all its active rivals."""
        if len(self._members) < 2:
            return False
        if rival not in self._active or now - self._renewed_at > RENEW_S:
            self._renew(rival, now)
        return any(
            not self._crowded_devices.isdisjoint(channel.devices) for channel in rival.channels
        )

    def _renew(self, rival: Rival, now: float) -> None:
        self._renewed_at = now
        self._active = {
            member
            for member in self._members
            if member is rival
            or member.claim(now) is not None
            or any(
                channel.batches or now - channel.replied < RECENT_S for channel in member.channels
            )
        }
        self._crowded_devices = set()
        for device in {
            device
            for member in self._active
            for channel in member.channels
            for device in channel.devices
        }:
            workers = [
                (member, channel)
                for member in self._active
                for channel in member.channels
                if device in channel.devices
            ]
            if len({member for member, _ in workers}) > 1 and sum(
                self._units_needed(channel) for _, channel in workers
            ) > self._capacity(device):
                self._crowded_devices.add(device)

    def granted(self, rival: Rival, now: float) -> Channel | None:
        """Return the idle worker to which a dispatcher may send a batch now, or None."""
        return self._grants(now).get(rival)

    def start_next(self) -> None:
        """Start batches after another one has ended, the most urgent first."""
        started: set[Rival] = set()
        while waiting := [
            rival for rival in self._grants(time.monotonic()) if rival not in started
        ]:
            started.add(waiting[0])
            waiting[0].start()

    def outlook(self, rival: Rival, now: float) -> tuple[float, float]:
        """Return when a batch of a new request may start, and the pause after each batch.

        In that pause, other models use the device.
        """
        first = rival.channels[0]
        devices, needed = set(first.devices), self._units_needed(first)
        rivals = [member for member in self._active if member is not rival]
        neighbours = [
            neighbour
            for neighbour in rivals
            if any(not devices.isdisjoint(channel.devices) for channel in neighbour.channels)
        ]
        running = [
            (neighbour, channel)
            for neighbour in neighbours
            for channel in self._busy(neighbour, devices, now)
        ]
        capacity = self._capacity(first.devices[0])  # It is equal for all devices of a model.
        used = sum(self._units_needed(channel) for _, channel in running)
        parallel = max(1, capacity // needed)
        start = (
            min(
                (neighbour.expected_end(channel, now) for neighbour, channel in running),
                default=now,
            )
            if used + needed > capacity
            else now
        )
        claims = {neighbour: neighbour.claim(now) for neighbour in neighbours}
        busy = {neighbour for neighbour, _ in running}
        waiting = [claim for claim in claims.values() if claim is not None]
        idle = [neighbour.next_batch(now) for neighbour, claim in claims.items() if claim is None]
        pause = sum(
            neighbour.next_batch(now).duration
            for neighbour, claim in claims.items()
            if claim is not None or neighbour in busy
        )
        if not running and not waiting:
            return now, pause / parallel
        # The greatest caution of all is used. Otherwise a single cautious model would never be
        # served, since the others would take all the time.
        caution = max(member.caution for member in (rival, *neighbours))
        return (
            start + expected_wait(rival.next_batch(now), waiting, idle, caution) / parallel,
            pause / parallel,
        )

    def _grants(self, now: float) -> dict[Rival, Channel]:
        """Return one channel for each dispatcher that may send a batch now.

        They are considered in `turn_order`. A later one takes no capacity that an earlier one
        needs.
        """
        members = [
            (member, claim) for member in self._members if (claim := member.claim(now)) is not None
        ]
        order = turn_order([claim for _, claim in members], now)
        busy = [
            channel
            for member in self._members
            for channel in self._busy(member, self._crowded_devices, now)
        ]
        used: dict[Device, float] = {
            device: sum(
                self._units_needed(channel) for channel in busy if device in channel.devices
            )
            for device in self._crowded_devices
        }
        grants: dict[Rival, Channel] = {}
        for _, rival in sorted(
            zip(order, [member for member, _ in members], strict=True), key=lambda pair: pair[0]
        ):
            idle = [channel for channel in rival.channels if not channel.batches]
            for channel in idle:
                needed = self._units_needed(channel)
                # A device that is not crowded counts as free.
                used_before = {device: used.get(device, -math.inf) for device in channel.devices}
                if all(
                    not units or units + needed <= self._capacity(device)
                    for device, units in used_before.items()
                ):
                    grants[rival] = channel
                    used |= {device: units + needed for device, units in used_before.items()}
                    break
            else:
                used |= {device: math.inf for channel in idle for device in channel.devices}
        self.is_blocking = len(grants) < len(members)
        return grants

    def _busy(self, rival: Rival, devices: set[Device], now: float) -> list[Channel]:
        """Return the channels that run a batch, except for overdue ones.

        A timer runs until the next of these batches is overdue.
        """
        busy = []
        for channel in rival.channels:
            if (
                channel.batches
                and not devices.isdisjoint(channel.devices)
                and (overdue_at := rival.overdue(channel)) > now
            ):
                busy.append(channel)
                if overdue_at < self._timer_at:
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer_at = overdue_at
                    self._timer = asyncio.get_running_loop().call_later(
                        overdue_at - now, self._on_timer
                    )
        return busy

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.start_next()

    def _capacity(self, device: Device) -> int:
        return self._cores if device is None else 1

    def _units_needed(self, channel: Channel) -> int:
        return min(channel.threads or self._cores, self._cores) if None in channel.devices else 1
