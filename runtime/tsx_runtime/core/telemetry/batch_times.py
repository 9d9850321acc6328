"""The times of a batch: points are recorded with its reply, durations are computed when read.

    arrived ... free ... sent ... began ... done ... answered
       |  queue  |    batch wait    |  worker  |

In `queue`, no worker was free for the request. In `batch wait`, one was, but the batch was not full
yet, or it was sent early and waited for the batch before it. The worker's time includes the
handler's steps. All points are time.monotonic(), which all processes of a machine share.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tsx_runtime.wire import TIMES, Buffer

NAN = math.nan
WorkerTimes: TypeAlias = tuple[float, float, float, float, float]  # see `wire.TIMES`
# The points `free`, `sent` and `answered`, the number of requests, `wire.TIMES`, the arrivals from
# `channel.pack_arrivals`, and the statuses unless all are 200. Arrivals are packed, because
# thousands of separate floats would be scattered in memory.
Batch: TypeAlias = tuple[float, float, float, int, bytes, bytes, Sequence[int] | None]
NO_TIMES = TIMES.pack(NAN, NAN, NAN, NAN, NAN)  # a placeholder: the worker sent no times


def times_in(extra: Buffer) -> bytes:
    """Copy the times from the extra of a frame, which may be large."""
    return bytes(extra[: TIMES.size]) if len(extra) >= TIMES.size else NO_TIMES


class BatchTimes(NamedTuple):
    # From then on, the worker had room for the batch: it was idle, or prepares batches ahead.
    free: float
    sent: float
    began: float  # The worker began with this batch.
    done: float  # The worker had finished it.
    answered: float  # The reply arrived.
    size: int  # number of requests
    preprocess: float  # seconds; NaN if the handler has no such step
    inference: float  # all of the worker's time if the handler has no steps
    postprocess: float

    @property
    def transit(self) -> float:
        """The seconds between front end and worker, in both directions, including waits.

        TorchServe's thread for a worker is busy for this time and for the worker's own.
        """
        return max(0.0, self.answered - self.sent - (self.done - self.began))

    def queue(self, arrived: float) -> float:
        return self.free - arrived if self.free > arrived else 0.0

    def wait(self, arrived: float) -> float:
        return self.began - (self.free if self.free > arrived else arrived)

    def total(self, arrived: float) -> float:
        return self.answered - arrived

    def seconds(self, arrived: float) -> dict[str, float]:
        """Return the seconds of a request's stages, in their order.

        `other` is the remaining time: for reading and writing bodies, and between the processes.
        """
        steps = {
            "preprocess": self.preprocess,
            "inference": self.inference,
            "postprocess": self.postprocess,
        }
        stages = {
            "queue": self.queue(arrived),
            "batch": self.wait(arrived),
            **{name: step_seconds for name, step_seconds in steps.items() if step_seconds >= 0.0},
        }
        total = self.total(arrived)
        return {**stages, "other": max(0.0, total - sum(stages.values())), "total": total}


def batch_times(
    free: float, sent: float, answered: float, size: int, worker: WorkerTimes
) -> BatchTimes:
    """Return the times of a batch, with its points in order and the steps within the worker's time.

    `worker` comes from a process that runs user code, so it is not trusted.
    `BatchAggregator.settle` does the same for many batches at a time.
    """
    began, seconds, *steps = worker
    max_seconds = answered - sent
    if not 0.0 <= seconds <= max_seconds:
        seconds = max_seconds
    if not sent <= began <= answered - seconds:
        began = answered - seconds
    # The seconds of steps that run in parallel (micro-batches) may exceed the worker's time.
    steps = [min(step, seconds) if step >= 0.0 else NAN for step in steps]
    return BatchTimes(min(free, sent), sent, began, began + seconds, answered, size, *steps)


def times_of(batch: Batch) -> BatchTimes:
    free, sent, answered, size, worker, *_ = batch
    return batch_times(free, sent, answered, size, TIMES.unpack(worker))


def arrival_times(batch: Batch) -> tuple[float, ...]:
    """Return the arrival time of each request."""
    return struct.unpack(f"{batch[3]}d", batch[5])


def oldest(batch: Batch) -> float:
    """Return the arrival time of the first request."""
    return min(arrival_times(batch))
