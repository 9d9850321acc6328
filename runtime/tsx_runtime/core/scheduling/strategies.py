"""The choice of one of five dispatchers by a version's model-config.yaml.

| model-config.yaml                      | dispatcher                | the worker's loop           |
|----------------------------------------|---------------------------|-----------------------------|
| (nothing)                              | Dispatcher                | batch: one after the other  |
| continuousBatching                     | JoiningDispatcher         | continuous: between calls   |
| asyncCommunication                     | JoiningDispatcher         | async: a task per request   |
| sequenceBatching                       | SequenceDispatcher        | batch                       |
| sequenceBatching, one of the two above | JoiningSequenceDispatcher | continuous or async         |
| splitRows                              | RowsDispatcher            | batch                       |

With useJobTicket, a request is refused if it would have to wait for a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tsx_archiver import ModelConfig
from tsx_runtime.core.scheduling.costs import CostQueue
from tsx_runtime.core.scheduling.dispatcher import Bounds, Dispatcher
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.core.scheduling.joining import JoiningDispatcher
from tsx_runtime.core.scheduling.queue import BatchLimits, RequestQueue
from tsx_runtime.errors import BadRequest
from tsx_runtime.features.sequences.dispatcher import (
    JoiningSequenceDispatcher,
    SequenceDispatcher,
)
from tsx_runtime.features.sequences.sequences import SequenceConfig
from tsx_runtime.features.split_rows.dispatcher import RowsDispatcher

# The limit of requests in an asynchronous handler; its engine decides how many run at a time.
MAX_CONCURRENT = 1024


class EntryPoint(NamedTuple):
    """The functions that accept a request, and that report a client who has left."""

    submit: Callable[[Job], None]
    leave: Callable[[Job], None]


class Strategy(NamedTuple):
    """The dispatch settings of model-config.yaml."""

    mode: str = "batch"  # the worker's loop: batch, continuous or async
    sequences: SequenceConfig | None = None  # only for a stateful model
    uses_job_tickets: bool = False
    # It is set if batches have a limited cost or preferred sizes; see `CostQueue`.
    cost_per_byte: float | None = None
    max_cost: int = 0  # limit of a batch's cost; 0: no limit
    split_rows: int = 0  # rows in each part of a request; 0: requests are not split


def strategy_of(config: ModelConfig) -> Strategy:
    """Return the strategy of a configuration; `parallel_of` checks groups of processes.

    Raises:
        BadRequest: The settings exclude each other.
    """
    if config.continuous_batching and config.async_communication:
        raise BadRequest(
            "model-config.yaml asks for continuousBatching and asyncCommunication: a worker"
            " supports only one of the two. Remove one."
        )
    mode = (
        "continuous"
        if config.continuous_batching
        else "async"
        if config.async_communication
        else "batch"
    )
    if config.batch_policy and (mode != "batch" or config.sequence_batching):
        raise BadRequest(
            f"model-config.yaml asks for batchPolicy: {config.batch_policy}, which does not apply"
            " to sequences, continuous batching and asynchronous handlers: they do not wait to"
            " fill a batch. Remove it."
        )
    return Strategy(mode, _sequences(config), bool(config.use_job_ticket))


def _sequences(config: ModelConfig) -> SequenceConfig | None:
    if not config.sequence_batching:
        return None
    if not config.sequence_max_idle_msec:
        raise BadRequest(
            "model-config.yaml asks for sequenceBatching, but not how long a sequence may idle: set"
            " sequenceMaxIdleMSec, such as 60000."
        )
    timeout = config.sequence_timeout_msec
    return SequenceConfig(
        max_idle=config.sequence_max_idle_msec / 1000,
        timeout=timeout / 1000 if timeout else None,
        max_sequences=config.max_num_sequence or 1,
        max_waiting=config.max_sequence_job_queue_size or 1,
        overlap=bool(config.continuous_batching),
    )


def make_dispatcher(
    label: str, limits: BatchLimits, bounds: Bounds, strategy: Strategy, max_response_size: int
) -> Dispatcher:
    joins_running = strategy.mode != "batch"
    if strategy.sequences is not None:
        return (JoiningSequenceDispatcher if joins_running else SequenceDispatcher)(
            label, limits, bounds, strategy.sequences
        )
    if joins_running:
        return JoiningDispatcher(label, limits, bounds)
    if strategy.split_rows:
        return RowsDispatcher(
            label, limits, bounds, strategy.split_rows, max_response_size, queue_of(strategy)
        )
    return Dispatcher(label, limits, bounds, queue_of(strategy))


def queue_of(strategy: Strategy) -> RequestQueue | None:
    """Return the queue of a strategy; None means a plain `RequestQueue`."""
    return (
        None
        if strategy.cost_per_byte is None
        else CostQueue(strategy.cost_per_byte, strategy.max_cost)
    )


def entry_point(dispatcher: Dispatcher, strategy: Strategy, response_timeout: float) -> EntryPoint:
    """Return the entry point of a dispatcher; with `useJobTicket`, no request may wait."""
    if not response_timeout:
        return EntryPoint(dispatcher.reject_without_time, dispatcher.leave)

    def submit_to_idle(job: Job) -> None:
        (dispatcher.submit if dispatcher.room() > 0 else dispatcher.reject_busy)(job)

    submit = submit_to_idle if strategy.uses_job_tickets else dispatcher.submit
    return EntryPoint(submit, dispatcher.leave)
