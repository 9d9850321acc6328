"""The dispatch settings of model-config.yaml, and the dispatcher of a version without a feature.

A feature may have a dispatcher of its own: see `Feature.dispatcher`. docs/concepts/data-plane.md
lists all dispatchers. With useJobTicket, a request is refused if it would have to wait for a
worker.
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

# The limit of requests in an asynchronous handler; its engine decides how many run at a time.
MAX_CONCURRENT = 1024


class EntryPoint(NamedTuple):
    """The functions that accept a request, and that report a client who has left."""

    submit: Callable[[Job], None]
    leave: Callable[[Job], None]


class SequenceConfig(NamedTuple):
    """The sequence settings of a model."""

    max_idle: float  # seconds without a request after which a sequence ends
    timeout: float | None = None  # longest duration of a sequence in seconds; None: no limit
    max_sequences: int = 1  # active sequences of a version
    max_waiting: int = 1  # waiting requests of a sequence
    # Whether a request is sent while earlier ones stream; it may tell the handler to end them.
    overlap: bool = False


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
    label: str, limits: BatchLimits, bounds: Bounds, strategy: Strategy
) -> Dispatcher:
    """Return the dispatcher of a version for which no feature has one.

    Raises:
        BadRequest: The version needs a feature that this server does not have.
    """
    features = {
        "slo": bounds.slo,
        "sequenceBatching": strategy.sequences,
        "splitRows": strategy.split_rows,
        "continuousBatching": strategy.mode == "continuous",
    }
    if missing := [name for name, value in features.items() if value]:
        raise BadRequest(
            f"{label} is configured with {', '.join(missing)}, for which this server has no"
            " feature. Remove it from the configuration, or install tsx-serve completely."
        )
    if strategy.mode == "async":
        return JoiningDispatcher(label, limits, bounds)
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
