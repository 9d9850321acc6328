"""The times of a batch: a few timestamps are recorded with its answers; durations are computed only
when they are read.

    arrived ... free ... sent ... began ... done ... answered
       |  queue  |    batch wait    |  worker  |

`queue`: no worker was free for the request. `batch wait`: one was, but the request waited for its
batch to fill, where the model asks for that, or behind the batch before it where its own was sent
early. Within the worker's time are the handler's steps. All points are time.monotonic(), which all
processes of a machine share.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tsx_runtime.wire import TIMES, Buffer

NAN = math.nan
WorkerTimes: TypeAlias = tuple[float, float, float, float, float]  # as in `wire.TIMES`
# free, sent, answered, requests, `wire.TIMES`, `channel.arrivals`, and the statuses if not all are
# 200. What could be lists is packed: thousands of floats that are kept until they are counted would
# each lie elsewhere
Batch: TypeAlias = tuple[float, float, float, int, bytes, bytes, Sequence[int] | None]
NOTHING = TIMES.pack(NAN, NAN, NAN, NAN, NAN)  # of a worker that sends none


def times_in(extra: Buffer) -> bytes:
    """As a copy: it outlives the frame, which may be large."""
    return bytes(extra[: TIMES.size]) if len(extra) >= TIMES.size else NOTHING


class BatchTimes(NamedTuple):
    # when a worker had room for the batch: it had nothing to do since, or took it ahead of time
    free: float
    sent: float
    began: float  # the worker, with this batch
    done: float  # the worker was
    answered: float  # the reply was here
    size: int  # requests
    preprocess: float  # seconds; NaN where the handler has no such step
    inference: float  # of a handler without steps: all of the worker's time
    postprocess: float

    @property
    def way(self) -> float:
        """To the worker and back, and the wait there: what TorchServe's thread for a worker is busy
        with beside the worker's own time.
        """
        return max(0.0, self.answered - self.sent - (self.done - self.began))

    def queue(self, arrived: float) -> float:
        return self.free - arrived if self.free > arrived else 0.0

    def wait(self, arrived: float) -> float:
        return self.began - (self.free if self.free > arrived else arrived)

    def total(self, arrived: float) -> float:
        return self.answered - arrived

    def seconds(self, arrived: float) -> dict[str, float]:
        """Of one request, part by part in their order; `other` is what is left: reading and writing
        bodies, the way there and back.
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
    """`worker` comes from a process that runs user code: whatever it sends, the points are in order
    and the steps within them.

    `BatchAggregator.settle` does the same for many batches at a time.
    """
    began, seconds, *steps = worker
    most = answered - sent
    if not 0.0 <= seconds <= most:
        seconds = most
    if not sent <= began <= answered - seconds:
        began = answered - seconds
    # Steps that ran side by side, as with micro-batches, add up to more than their time.
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


def moments(batch: Batch) -> tuple[float, ...]:
    """When each of its requests arrived."""
    return struct.unpack(f"{batch[3]}d", batch[5])


def oldest(batch: Batch) -> float:
    """When the first of its requests arrived."""
    return min(moments(batch))
