"""Descriptions of models, versions and workers for the management API, and their health."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tsx_archiver.metadata.model_limits import LIMITS
from tsx_runtime.api.management.schemas import (
    DescribedMeasurement,
    DescribedModel,
    DescribedWorker,
    JobQueue,
    ListedModel,
    ModelList,
    NotReadyModel,
)
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.metrics.gpu import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tsx_runtime.core.models.model import Model, ModelVersion
    from tsx_runtime.core.registry.registry import Registry

PAGE = 100

ItemT = TypeVar("ItemT")
Memory: TypeAlias = "Mapping[Worker, int]"  # bytes; workers that started later have no entry


def memory_of(workers: Iterable[Worker]) -> Memory:
    """Return the memory of workers; this reads several files per worker, so call it in a thread."""
    return {worker: worker.memory() for worker in workers}


def describe_version(version: ModelVersion, gpus: dict[int, Gpu], memory: Memory) -> DescribedModel:
    config = version.config
    plan = version.plan
    pending = version.pending
    limits: dict[str, Any] = {
        name: getattr(plan, name) or (0 if limit.changeable else None)
        for name, limit in LIMITS.items()
    }
    limits |= version.current_limits
    return DescribedModel(
        model_name=version.name,
        model_version=version.version,
        model_url=version.url or None,
        runtime=version.runtime or "python",
        min_workers=version.min_workers,
        max_workers=version.max_workers,
        max_retry_timeout_in_sec=plan.max_retry_timeout,
        parallel_type=config.parallel_type or "",
        parallel_level=config.parallel_level
        or (plan.parallel.ranks if plan.parallel.is_group else 0),
        use_venv=bool(config.use_venv),
        continuous_batching=plan.strategy.mode == "continuous",
        use_job_ticket=plan.strategy.uses_job_tickets,
        stateful=bool(config.sequence_max_idle_msec),
        sequence_max_idle_m_sec=config.sequence_max_idle_msec or 0,
        sequence_timeout_m_sec=config.sequence_timeout_msec or 0,
        max_num_sequence=config.max_num_sequence or 0,
        max_sequence_job_queue_size=config.max_sequence_job_queue_size or 0,
        device_type=plan.device_type or ("gpu" if plan.gpus else "cpu"),
        device_ids=list(plan.device_ids) or None,
        loaded_at_startup=version.loaded_at_startup,
        workers=[
            describe_worker(worker, gpus, memory.get(worker, 0)) for worker in version.workers
        ],
        job_queue_status=JobQueue(
            remaining_capacity=max(0, version.queue_capacity - pending), pending_requests=pending
        ),
        worker_restarts=version.stats.restarts,
        worker_recycles=dict(version.stats.recycled) or None,
        scale_to_zero=plan.scale_to_zero or None,
        asleep=version.asleep or None,
        last_scaling=version.last_scaling,
        last_error=version.last_error,
        signature=version.signature,
        form=", ".join(version.forms) or None,
        forms_passed_over=version.forms_passed_over or None,
        measured=(
            None
            if version.benchmark_record is None
            else DescribedMeasurement(**version.benchmark_record._asdict())
        ),
        **limits,
        **feature_fields(version),
    )


def feature_fields(version: ModelVersion) -> dict[str, Any]:
    """Return the fields of the features' descriptions of a version."""
    return {
        name: value
        for feature in version.features
        for name, value in feature.describe(version).items()
    }


def describe_worker(worker: Worker, gpus: dict[int, Gpu], memory: int) -> DescribedWorker:
    gpu = None if worker.gpu_id is None else gpus.get(worker.gpu_id)
    return DescribedWorker(
        id=worker.id,
        start_time=worker.started.strftime("%Y-%m-%dT%H:%M:%S.")
        + f"{worker.started.microsecond // 1000:03d}Z",
        status=worker.state.value,
        memory_usage=memory,
        pid=worker.pid,
        gpu=worker.gpu_id is not None,
        gpu_usage="N/A" if gpu is None or worker.gpu_id is None else gpu.usage(worker.gpu_id),
        restarts=worker.restarts,
    )


def list_models(models: Iterable[Model], limit: int, start: int) -> ModelList:
    """Return a page of models by name; functions of workflows have no archive and are omitted."""
    sorted_models = sorted(
        (model for model in models if model.versions[model.default].url),
        key=lambda model: model.name,
    )
    page, next_start = page_of(sorted_models, limit, start)
    listed_models = [
        ListedModel(model_name=model.name, model_url=model.versions[model.default].url)
        for model in page
    ]
    return ModelList(next_page_token=next_start, models=listed_models)


def page_of(
    sorted_models: Sequence[ItemT], limit: int, start: int
) -> tuple[Sequence[ItemT], str | None]:
    """Return a page of items, and the start of the next page.

    As in TorchServe, an invalid limit becomes the largest one, and a negative start becomes 0.
    """
    if not 1 <= limit <= PAGE:
        limit = PAGE
    start = max(0, start)
    next_start = start + limit
    return sorted_models[start:next_start], str(next_start) if next_start < len(
        sorted_models
    ) else None


def unready_versions(registry: Registry) -> list[NotReadyModel]:
    """Return the default versions that have no ready worker but should have one."""
    now = time.monotonic()
    waiting = [
        NotReadyModel(
            model_name=name,
            model_version=version,
            reason="it could not be loaded at the start; its description says why",
        )
        for name, version in registry.not_loaded
        if name not in registry.models
    ]
    for model in registry.models.values():
        version = model.versions.get(model.default)
        if version is None or not version.min_workers or version.ready:
            continue
        states = Counter(worker.state for worker in version.workers)
        states_text = (
            ", ".join(f"{count} {state.value}" for state, count in states.items()) or "none"
        )
        reason = f"no worker is ready; workers: {states_text}"
        if states[WorkerState.FAILED]:
            wait_s = min(
                worker.next_start - now
                for worker in version.workers
                if worker.state is WorkerState.FAILED
            )
            reason += f"; the next attempt is in {max(0.0, wait_s):.0f} s"
        waiting.append(
            NotReadyModel(model_name=version.name, model_version=version.version, reason=reason)
        )
    return waiting


def is_healthy(models: Iterable[Model]) -> bool:
    """Tell whether each default version has enough ready workers, or no failed one.

    A worker has failed once its restarts have lasted for `maxRetryTimeoutInSec`, or have ended with
    the same error three times.
    """
    for model in models:
        version = model.versions.get(model.default)
        if version is None:
            continue
        ready = sum(worker.state is WorkerState.READY for worker in version.workers)
        if ready < version.min_workers and any(
            worker.state is WorkerState.FAILED for worker in version.workers
        ):
            return False
    return True


def is_given_up(version: ModelVersion) -> bool:
    """Tell whether no worker is ready and at least one has failed.

    A worker that restarts may still become ready, so the instance need not be replaced.
    """
    states = Counter(worker.state for worker in version.workers)
    return (
        version.min_workers > 0 and not states[WorkerState.READY] and states[WorkerState.FAILED] > 0
    )
