"""The plan of a version: its registration, its model-config.yaml and the settings, merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tsx_archiver import ModelConfig
from tsx_archiver.metadata.model_limits import LIMITS, ModelLimits
from tsx_archiver.metadata.slo import latency_target
from tsx_runtime import wire
from tsx_runtime.core.models.latency_curve import SIZES
from tsx_runtime.core.placement.placement import Parallel, candidate_gpus, gpus_for, parallel_of
from tsx_runtime.core.scheduling.dispatcher import Bounds
from tsx_runtime.core.scheduling.queue import NEVER, BatchLimits
from tsx_runtime.core.scheduling.strategies import MAX_CONCURRENT, Strategy, strategy_of
from tsx_runtime.core.workers.health import Recycling
from tsx_runtime.errors import BadRequest
from tsx_runtime.plugins import BatchPolicy
from tsx_runtime.settings.schema import ModelSettings, Settings
from tsx_runtime.settings.torchserve import VersionSettings

NO_VERSION_SETTINGS = VersionSettings()
# The server decides these if there is a latency target.
BATCH_PARAMETERS = ("batch_size", "max_batch_delay", "job_queue_size")
MAX_WORKERS = 1024  # per version; no setting allows more
MAX_PLAUSIBLE_WORKERS = 64  # per version on up to 4 cores, unless maxWorkers allows more


@dataclass(frozen=True)
class RegisterOrder(ModelLimits["int | None"]):
    """The parameters of a registration.

    None means that the archive's model-config.yaml decides, or else the settings.
    """

    url: str
    model_name: str | None = None
    version: str | None = None
    handler: str | None = None
    runtime: str | None = None
    initial_workers: int | None = None
    max_workers: int | None = None  # None: as `initial_workers`
    # Whether minWorkers in the archive overrides `initial_workers`, as in TorchServe's API.
    archive_first: bool = False
    default_workers: int | None = None  # initial number if neither archive nor settings set one
    device_type: str | None = None
    scale_to_zero: float | None = None  # seconds
    batch_buckets: tuple[int, ...] | None = None
    loaded_at_startup: bool = False
    must_load: bool = False  # whether the program ends with an error if loading fails
    workflow: str = ""  # the workflow of which it is a node; without a url it is a Python function
    s3_sse_kms: bool = False
    slo: str | None = None  # a latency target, which excludes BATCH_PARAMETERS
    # Whether to replace the version with the same number, or else the default one. A model without
    # versions just gets this one.
    replaces: bool = False


def unset_values(order: RegisterOrder, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the order does not set itself.

    A latency target in the order leaves out BATCH_PARAMETERS, and one of these leaves out a target.
    """
    excluded = (
        BATCH_PARAMETERS
        if order.slo is not None
        else ("slo",)
        if any(getattr(order, name) is not None for name in BATCH_PARAMETERS)
        else ()
    )
    return {
        name: value
        for name, value in values.items()
        if name not in excluded and getattr(order, name) is None
    }


def with_model_settings(
    order: RegisterOrder, model_settings: ModelSettings | None
) -> RegisterOrder:
    """Fill in parameters that the order does not set from the settings of its model."""
    if model_settings is None:
        return order
    own_values = unset_values(
        order, {name: getattr(model_settings, name) for name in (*LIMITS, "slo")}
    )
    own_values |= {
        name: getattr(model_settings, name)
        for name in ("max_workers", "scale_to_zero")
        if getattr(order, name) is None
    }
    workers = model_settings.workers if order.initial_workers is None else order.initial_workers
    buckets = None if model_settings.batch_buckets is None else tuple(model_settings.batch_buckets)
    own_values |= {
        "device_type": order.device_type or model_settings.device,
        "batch_buckets": buckets,
    }
    return replace(order, initial_workers=workers, **own_values)


class HandlerDefaults(NamedTuple):
    """The defaults for the models of a handler, where they differ from the common ones.

    Attributes:
        limits: Values that replace the defaults in `LIMITS`.
        workers: The initial number of workers if nothing sets one.
        is_async: Whether each request is a task of the handler's event loop.
        package: The package that loads the model, and the extra that installs it.
    """

    limits: Mapping[str, int] = {}
    workers: int | None = None
    is_async: bool = False
    package: tuple[str, str] | None = None


NO_DEFAULTS = HandlerDefaults()


@dataclass(frozen=True)
class VersionPlan(ModelLimits[int]):
    """The effective configuration of a version.

    The registration overrides model-config.yaml, which overrides the settings.
    """

    max_retry_timeout: int  # seconds
    min_workers: int
    max_workers: int
    scale_to_zero: float  # seconds without a request before it is unloaded; 0: never
    device_type: str | None
    device_ids: tuple[int, ...]
    threads: int | None
    parallel: Parallel
    gpus: tuple[int, ...]  # the candidates for workers; empty for the CPU
    wait: bool  # whether a batch that is not full waits for `max_batch_delay`
    strategy: Strategy
    policy: BatchPolicy | None = None  # a plugin; requires `wait`
    slo: str | None = None  # a latency target; BATCH_PARAMETERS then have no effect
    batch_buckets: tuple[int, ...] = ()

    @property
    def limits(self) -> BatchLimits:
        wait = self.max_batch_delay / 1000 if self.wait else None
        items = MAX_CONCURRENT if self.strategy.mode == "async" else self.batch_size or 1
        size, cost = min(self.max_batch_bytes, wire.MAX_SIZE // 2), self.batch_cost or NEVER
        return BatchLimits(
            min(items, wire.MAX_ITEMS), size, wait, self.policy, cost, self.batch_buckets
        )

    @property
    def unchangeable_parameters(self) -> tuple[str, ...]:
        """The parameters that cannot be changed while the version is served.

        A latency target and BATCH_PARAMETERS exclude each other.
        """
        return BATCH_PARAMETERS if self.slo is not None else ("slo",)

    @property
    def batch_cost(self) -> int:
        """The limit of a batch's cost; 0: no limit."""
        return self.max_batch_cost or self.max_batch_tokens

    @property
    def bounds(self) -> Bounds:
        target = None if self.slo is None else latency_target(self.slo)
        return Bounds(self.job_queue_size, self.max_queue_bytes, self.overload_status, target)

    @property
    def recycling(self) -> Recycling:
        return Recycling(self.max_worker_requests, self.max_worker_memory, self.max_worker_age)


def plan(
    order: RegisterOrder,
    config: ModelConfig,
    settings: Settings,
    gpus: int,
    version_settings: VersionSettings = NO_VERSION_SETTINGS,
    defaults: HandlerDefaults = NO_DEFAULTS,
) -> VersionPlan:
    """Merge the sources of a version's configuration.

    Args:
        order: The registration.
        config: The model-config.yaml of the archive.
        settings: The settings of the server.
        gpus: The number of GPUs that the server uses.
        version_settings: The settings of this version in config.properties.
        defaults: The defaults of the handler.

    Raises:
        BadRequest: The values contradict each other, or a worker needs more GPUs than there are.
    """
    device_type = order.device_type or config.device_type
    gpus = gpus_for(device_type, gpus)
    parallel = parallel_of(config, gpus)
    workers, maximum = _workers(order, config, settings, gpus // parallel.gpus, version_settings)
    maximum = max(maximum, order.max_workers or 0)
    scale_to_zero = (
        order.scale_to_zero if order.scale_to_zero is not None else config.scale_to_zero or 0.0
    )
    if scale_to_zero and config.use_job_ticket:
        raise BadRequest(
            "scaleToZero needs requests to wait while the model is loaded, and with useJobTicket no"
            " request waits. Remove one of the two."
        )
    strategy = strategy_of(config)
    slo = _slo(order, config, version_settings, strategy)
    limits: dict[str, Any] = {
        name: _first(
            *(getattr(source, name, None) for source in (order, config, version_settings)),
            getattr(settings, limit.setting, defaults.limits.get(name, limit.default)),
        )
        for name, limit in LIMITS.items()
    }
    if slo is not None:
        limits |= {"batch_size": SIZES[-1], "max_batch_delay": 0}
    buckets = order.batch_buckets or config.batch_buckets or ()
    return VersionPlan(
        max_retry_timeout=_first(config.max_retry_timeout, 300),
        min_workers=workers,
        max_workers=max(maximum, 1) if scale_to_zero else maximum,
        scale_to_zero=scale_to_zero,
        device_type=device_type,
        device_ids=tuple(config.device_ids or ()),
        threads=config.threads,
        parallel=parallel,
        gpus=tuple(candidate_gpus(config.device_ids or (), gpus, parallel.gpus)),
        wait=config.batch_policy == "wait",
        slo=slo,
        strategy=_with_rows(
            _with_costs(strategy, limits["max_batch_cost"], limits["max_batch_tokens"], buckets),
            limits["split_rows"],
            slo,
        ),
        batch_buckets=buckets,
        **limits,
    )


def _slo(
    order: RegisterOrder, config: ModelConfig, version_settings: VersionSettings, strategy: Strategy
) -> str | None:
    """Return the latency target of the first source that sets it or BATCH_PARAMETERS.

    If the first source sets BATCH_PARAMETERS, which exclude a target, the result is None.
    """
    for source in (order, config, version_settings):
        slo: str | None = getattr(source, "slo", None)
        batch_parameters = [
            LIMITS[name].key for name in BATCH_PARAMETERS if getattr(source, name, None) is not None
        ]
        if slo is None and not batch_parameters:
            continue
        if slo is not None:
            exclusive = {
                "batchPolicy": config.batch_policy,
                "sequenceBatching": strategy.sequences,
                "useJobTicket": strategy.uses_job_tickets,
            }
            exclusive |= {"continuousBatching or asyncCommunication": strategy.mode != "batch"}
            if unfit := [*batch_parameters, *(name for name, value in exclusive.items() if value)]:
                raise BadRequest(
                    f"slo: {slo} stands in place of {', '.join(unfit)}: the server then forms the"
                    " batches. Remove one of the two."
                )
        return slo
    return None


def _with_costs(strategy: Strategy, cost: int, tokens: int, buckets: tuple[int, ...]) -> Strategy:
    if not (cost or tokens or buckets):
        return strategy
    if strategy.mode != "batch" or strategy.sequences is not None:
        text = (
            "maxBatchCost, maxBatchTokens and batchBuckets do not apply to sequences, continuous"
            " batching and asynchronous handlers"
        )
        raise BadRequest(f"{text}: their requests are not gathered in batches. Remove them.")
    if cost and tokens:
        raise BadRequest("maxBatchCost and maxBatchTokens are two names of one bound. Remove one.")
    return strategy._replace(cost_per_byte=NEVER if tokens else 1.0, max_cost=cost or tokens)


def _with_rows(strategy: Strategy, rows: int, slo: str | None) -> Strategy:
    exclusive = {
        "slo": slo,
        "sequenceBatching": strategy.sequences,
        "useJobTicket": strategy.uses_job_tickets,
    }
    exclusive |= {"continuousBatching or asyncCommunication": strategy.mode != "batch"}
    if rows and (unfit := [name for name, value in exclusive.items() if value]):
        raise BadRequest(f"splitRows cannot be had with {', '.join(unfit)}. Remove one of the two.")
    return strategy._replace(split_rows=rows)


def check_workers(count: int, model: str, cores: int, *allowed: int) -> None:
    """Refuse more workers than make sense for `cores`, unless one of `allowed` permits them.

    `allowed` are values of maxWorkers.

    Raises:
        BadRequest: There would be too many workers.
    """
    if count > MAX_WORKERS:
        raise BadRequest(
            f"{count} workers are too many: the limit is {MAX_WORKERS} per version of a model."
            " Request fewer."
        )
    maximum = max(MAX_PLAUSIBLE_WORKERS, MAX_PLAUSIBLE_WORKERS // 4 * cores, *allowed)
    if count > maximum:
        raise BadRequest(
            f"{count} workers are too many for {cores} cores: at most {maximum} start. If they are"
            f" meant, set maxWorkers: {count} in the archive's model-config.yaml, or max_workers ="
            f" {count} in [models.{model}] of tsx.toml."
        )


def _workers(
    order: RegisterOrder,
    config: ModelConfig,
    settings: Settings,
    gpu_workers: int,
    version_settings: VersionSettings,
) -> tuple[int, int]:
    """Return the initial and the largest number of workers.

    Args:
        order: The registration.
        config: The model-config.yaml of the archive.
        settings: The settings of the server.
        gpu_workers: The number of workers for which the GPUs suffice.
        version_settings: The settings of this version in config.properties.
    """
    if order.initial_workers is not None:
        return order.initial_workers, order.initial_workers
    if config.min_workers and has_workers(config):
        return config.min_workers, config.max_workers or config.min_workers
    if version_settings.min_workers is not None:
        return version_settings.min_workers, max(
            version_settings.min_workers, version_settings.max_workers or 0
        )
    workers = settings.default_workers_per_model
    if order.loaded_at_startup:
        workers = workers or gpu_workers or order.default_workers or 1
    return workers, workers


def has_workers(config: ModelConfig) -> bool:
    """Tell whether the archive sets a valid number of workers."""
    return bool(
        config.min_workers and (config.max_workers or config.min_workers) >= config.min_workers
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
