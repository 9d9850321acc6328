"""The times of a batch: timestamps are recorded with its replies, durations computed when read.

    arrived ... free ... sent ... began ... done ... answered
       |  queue  |    batch wait    |  worker  |

In `queue`, no worker was free for the request. In `batch wait`, one was, but the batch was not full
yet, or it was sent early and waited for the batch before it. The worker's time holds the handler's
steps. All points are time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tsx_runtime.wire import TIMES, Buffer

NAN = math.nan
WorkerTimes: TypeAlias = tuple[float, float, float, float, float]  # see `wire.TIMES`
# free, sent, answered, requests, `wire.TIMES`, `channel.arrivals`, and the statuses unless all are
# 200. Arrivals are packed: thousands of separate floats would lie scattered in memory.
Batch: TypeAlias = tuple[float, float, float, int, bytes, bytes, Sequence[int] | None]
NO_TIMES = TIMES.pack(NAN, NAN, NAN, NAN, NAN)  # stands for the times that a worker did not send


def times_in(extra: Buffer) -> bytes:
    """Copy the times from a frame, which may be large and ends earlier."""
    return bytes(extra[: TIMES.size]) if len(extra) >= TIMES.size else NO_TIMES


class BatchTimes(NamedTuple):
    # The worker had room for the batch: it was idle, or takes batches ahead of time.
    free: float
    sent: float
    began: float  # The worker began with this batch.
    done: float  # The worker had finished it.
    answered: float  # The reply arrived.
    size: int  # requests
    preprocess: float  # seconds; NaN if the handler has no such step
    inference: float  # a handler without steps: all of the worker's time
    postprocess: float

    @property
    def transit(self) -> float:
        """The seconds between front end and worker, both ways, with the wait there.

        TorchServe's thread for a worker is busy for this time and the worker's own.
        """
        return max(0.0, self.answered - self.sent - (self.done - self.began))

    def queue(self, arrived: float) -> float:
        return self.free - arrived if self.free > arrived else 0.0

    def wait(self, arrived: float) -> float:
        return self.began - (self.free if self.free > arrived else arrived)

    def total(self, arrived: float) -> float:
        return self.answered - arrived

    def seconds(self, arrived: float) -> dict[str, float]:
        """Return the seconds of a request's stages in their order.

        `other` is the remaining time: reading and writing bodies, and the way to the worker and
        back.
        """
        steps = {
            "preprocess": self.preprocess,
            "inference": self.inference,
            "postprocess": self.postprocess,
        }
        parts = {
            "queue": self.queue(arrived),
            "batch": self.wait(arrived),
            **{name: took for name, took in steps.items() if took >= 0.0},
        }
        total = self.total(arrived)
        return {**parts, "other": max(0.0, total - sum(parts.values())), "total": total}


def batch_times(
    free: float, sent: float, answered: float, size: int, worker: WorkerTimes
) -> BatchTimes:
    """Return the times of a batch, with the points in order and the steps within them.

    `worker` comes from a process that runs user code, and is not trusted. `BatchAggregator.settle`
    does the same for many batches at a time.
    """
    began, seconds, *steps = worker
    max_seconds = answered - sent
    if not 0.0 <= seconds <= max_seconds:
        seconds = max_seconds
    if not sent <= began <= answered - seconds:
        began = answered - seconds
    # Steps that ran at the same time (micro-batches) add up to more than their time.
    steps = [min(step, seconds) if step >= 0.0 else NAN for step in steps]
    return BatchTimes(
        min(free, sent),
        sent,
        began,
        began + seconds,
        answered,
        size,
        *steps,
    )


def times_of(batch: Batch) -> BatchTimes:
    free, sent, answered, size, worker, *_ = batch
    return batch_times(free, sent, answered, size, TIMES.unpack(worker))


def arrival_times(batch: Batch) -> tuple[float, ...]:
    """Return the arrival of each request."""
    return struct.unpack(f"{batch[3]}d", batch[5])


def oldest(batch: Batch) -> float:
    """Return the first arrival of a request."""
    return min(arrival_times(batch))
