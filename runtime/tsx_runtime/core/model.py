"""A model and its versions: an opened archive, a queue, and workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import yaml

from tsx_archiver import ModelConfig, OpenArchive
from tsx_runtime import wire
from tsx_runtime.core.devices import candidates, gpus_for
from tsx_runtime.core.dispatcher import Bounds
from tsx_runtime.core.environments import Environment
from tsx_runtime.core.health import Recycling
from tsx_runtime.core.jobs import Job
from tsx_runtime.core.journal import Journal
from tsx_runtime.core.launch import Launch
from tsx_runtime.core.lsp import handler_of
from tsx_runtime.core.metricsconfig import read_metrics_config
from tsx_runtime.core.pace import retry_after
from tsx_runtime.core.parallel import Parallel, parallel_of
from tsx_runtime.core.places import Machine, Place, launch_of, place_of
from tsx_runtime.core.processes import ProcessStarter
from tsx_runtime.core.queue import Limits
from tsx_runtime.core.routing import Headers
from tsx_runtime.core.split import Split
from tsx_runtime.core.stateful import HeaderNames, SequenceDispatcher
from tsx_runtime.core.stats import Stats
from tsx_runtime.core.strategies import MOST_AT_ONCE, Strategy, entrance, make_dispatcher, strategy
from tsx_runtime.core.supervisor import Supervisor
from tsx_runtime.core.worker import Worker, WorkerState
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.plugins import BatchPolicy
from tsx_runtime.settings import TUNABLE, ModelSettings, Settings
from tsx_runtime.torchserve_keys import VersionSettings
from tsx_runtime.version import __version__

NOTHING_OWN = VersionSettings()
MOST_WORKERS = 1024  # of one version: a slip of the keyboard must not fill the machine with processes


@dataclass(frozen=True)
class RegisterOrder:
    """What a registration asks for; None leaves it to the archive's model-config.yaml, then to the settings."""

    url: str
    model_name: str | None = None
    version: str | None = None
    handler: str | None = None
    runtime: str | None = None
    initial_workers: int | None = None
    max_workers: int | None = None  # with initial_workers; as many if not set
    default_workers: int | None = None  # at start, where nothing else says how many
    batch_size: int | None = None
    max_batch_bytes: int | None = None
    max_batch_delay: int | None = None  # ms
    job_queue_size: int | None = None
    max_queue_bytes: int | None = None
    response_timeout: int | None = None  # s
    startup_timeout: int | None = None  # s
    client_timeout: int | None = None  # ms; 0: none
    overload_status: int | None = None
    device_type: str | None = None
    max_worker_requests: int | None = None
    max_worker_memory: int | None = None  # MB
    max_worker_age: int | None = None  # s
    loaded_at_startup: bool = False
    workflow: str = ""  # whose node it is; a node without a url is a function of the workflow's own
    s3_sse_kms: bool = False


def with_own_settings(order: RegisterOrder, own: ModelSettings | None) -> RegisterOrder:
    """The order, filled up with what the settings say of this model."""
    if own is None:
        return order
    names = (*TUNABLE, "max_worker_requests", "max_worker_memory", "max_worker_age")
    own_values = {name: getattr(own, name) for name in names if getattr(order, name) is None}
    workers = own.workers if order.initial_workers is None else order.initial_workers
    return replace(order, initial_workers=workers, device_type=order.device_type or own.device, **own_values)


@dataclass(frozen=True)
class Plan:
    """What holds for a version once registration, model-config.yaml and settings are weighed, in that order."""

    batch_size: int
    max_batch_bytes: int
    max_batch_delay: int  # ms
    job_queue_size: int
    max_queue_bytes: int
    response_timeout: int  # s
    startup_timeout: int  # s
    client_timeout: int  # ms; 0: none
    overload_status: int
    max_retry_timeout: int  # s
    min_workers: int
    max_workers: int
    device_type: str | None
    device_ids: tuple[int, ...]
    threads: int | None
    parallel: Parallel
    gpus: tuple[int, ...]  # that workers are spread over; empty for the CPU
    wait: bool
    recycling: Recycling
    strategy: Strategy
    policy: BatchPolicy | None = None  # a plugin's; then `wait` is true

    @property
    def limits(self) -> Limits:
        wait = self.max_batch_delay / 1000 if self.wait else None
        items = MOST_AT_ONCE if self.strategy.mode == "async" else self.batch_size
        return Limits(min(items, wire.MAX_ITEMS), min(self.max_batch_bytes, wire.MAX_SIZE // 2), wait, self.policy)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.job_queue_size, self.max_queue_bytes, self.overload_status)


def plan(order: RegisterOrder, config: ModelConfig, settings: Settings, gpus: int, own: VersionSettings = NOTHING_OWN) -> Plan:
    """`gpus`: how many the server uses. `own` is what a config.properties says of this version.

    Raises BadRequest for more workers, or more GPUs a worker, than there is room for.
    """
    device_type = order.device_type or config.device_type
    gpus = gpus_for(device_type, gpus)
    parallel = parallel_of(config, gpus)
    workers, most = _workers(order, config, settings, gpus // parallel.gpus, own)
    check_workers(workers)
    return Plan(
        batch_size=_first(order.batch_size, config.batch_size, own.batch_size, 1),
        max_batch_bytes=_first(order.max_batch_bytes, config.max_batch_bytes, Limits().max_bytes),
        max_batch_delay=_first(order.max_batch_delay, config.max_batch_delay, own.max_batch_delay, 100),
        job_queue_size=_first(order.job_queue_size, config.job_queue_size, settings.job_queue_size),
        max_queue_bytes=_first(order.max_queue_bytes, config.max_queue_bytes, settings.max_queue_bytes),
        response_timeout=_first(order.response_timeout, config.response_timeout, own.response_timeout, settings.default_response_timeout),
        startup_timeout=_first(order.startup_timeout, config.startup_timeout, own.startup_timeout, settings.default_startup_timeout),
        client_timeout=_first(order.client_timeout, config.client_timeout, 0),
        overload_status=_first(order.overload_status, config.overload_status, settings.overload_status),
        max_retry_timeout=_first(config.max_retry_timeout, 300),
        min_workers=workers,
        max_workers=most,
        device_type=device_type,
        device_ids=tuple(config.device_ids or ()),
        threads=config.threads,
        parallel=parallel,
        gpus=tuple(candidates(config.device_ids or (), gpus, parallel.gpus)),
        wait=config.batch_policy == "wait",
        recycling=Recycling(
            _first(order.max_worker_requests, config.max_worker_requests, settings.max_worker_requests),
            _first(order.max_worker_memory, config.max_worker_memory, settings.max_worker_memory),
            _first(order.max_worker_age, config.max_worker_age, settings.max_worker_age),
        ),
        strategy=strategy(config),
    )


def check_workers(count: int) -> None:
    if count > MOST_WORKERS:
        raise BadRequest(f"{count} workers are too many: a version of a model has {MOST_WORKERS} at most. Ask for fewer.")


def _workers(order: RegisterOrder, config: ModelConfig, settings: Settings, gpus: int, own: VersionSettings) -> tuple[int, int]:
    """`gpus`: for how many workers there are GPUs."""
    if order.initial_workers is not None:
        return order.initial_workers, max(order.initial_workers, order.max_workers or 0)
    if config.min_workers and config.min_workers > 0 and (config.max_workers or config.min_workers) >= config.min_workers:
        return config.min_workers, config.max_workers or config.min_workers
    if own.min_workers is not None:
        return own.min_workers, max(own.min_workers, own.max_workers or 0)
    workers = settings.default_workers_per_model
    if order.loaded_at_startup:
        workers = workers or gpus or order.default_workers or 1
    return workers, workers


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


class Host(NamedTuple):
    """What all versions of this server share."""

    settings: Settings
    starter: ProcessStarter
    machine: Machine
    ids: Iterator[int]  # of workers
    choose_gpus: Callable[[Plan], tuple[int, ...]]  # for one more worker
    worker_output: str = ""  # see `LoadOrder.output`


class ModelVersion:
    """One version that is registered. `submit` takes requests at once; they wait while workers are on their way."""

    def __init__(
        self,
        name: str,
        version: str,
        archive: OpenArchive,
        order: RegisterOrder,
        chosen: Plan,
        host: Host,
        environment: Environment | None = None,
    ) -> None:
        """Raises BadRequest for an archive that no worker of this server can run."""
        settings = host.settings
        self.name = name
        self.version = version
        self.archive = archive
        self.plan = chosen
        self.url = order.url
        self.envelope = str((archive.manifest.data.get("model") or {}).get("envelope") or settings.service_envelope or "")
        self.runtime = order.runtime or archive.manifest.runtime
        self.handler = handler_of(
            archive, order.handler or archive.manifest.handler or settings.default_service_handler or "", self.runtime
        )
        self.loaded_at_startup = order.loaded_at_startup
        self.workflow = order.workflow
        self.min_workers = chosen.min_workers
        self.max_workers = chosen.max_workers
        self.client_timeout = chosen.client_timeout / 1000  # s; 0: none
        self.max_response_size = settings.max_response_size
        self._host = host
        self._environment = environment
        self._names = HeaderNames(
            settings.ts_header_key_sequence_id, settings.ts_header_key_sequence_start, settings.ts_header_key_sequence_end
        )
        label = f'Model "{name}" [Version {version}]'
        self._dispatcher = make_dispatcher(label, chosen.limits, chosen.bounds, chosen.strategy, self._names)
        self._dispatcher.response_timeout = chosen.response_timeout
        if settings.metrics_mode != "prometheus":
            self.stats.journal = Journal()
        self._supervisor = self._make_supervisor(label)
        self.submit: Callable[[Job], None] = entrance(self._dispatcher, chosen.strategy)
        self.leave: Callable[[Job], None] = self._dispatcher.leave

    def _make_supervisor(self, label: str) -> Supervisor:
        chosen, host = self.plan, self._host
        return Supervisor(
            label,
            self._dispatcher,
            host.starter,
            self._load_order,
            ids=host.ids,
            next_gpus=lambda: host.choose_gpus(chosen),
            launch=self._launch,
            response_timeout=chosen.response_timeout,
            startup_timeout=chosen.startup_timeout,
            max_retry_timeout=chosen.max_retry_timeout,
            recycling=chosen.recycling,
            heartbeat=host.settings.heartbeat_interval,
            heartbeat_timeout=host.settings.heartbeat_timeout,
        )

    @property
    def config(self) -> ModelConfig:
        return self.archive.config

    @property
    def manifest(self) -> dict[str, Any]:
        return self.archive.manifest.data

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size

    @property
    def max_batch_delay(self) -> int:
        return self.plan.max_batch_delay

    @property
    def response_timeout(self) -> int:
        return self.plan.response_timeout

    @property
    def startup_timeout(self) -> int:
        return self.plan.startup_timeout

    @property
    def workers(self) -> list[Worker]:
        return self._supervisor.workers

    @property
    def last_error(self) -> str | None:
        return self._supervisor.last_error

    @property
    def pending(self) -> int:
        """Requests that wait for a worker."""
        return self._dispatcher.pending

    @property
    def ready(self) -> bool:
        """Whether a worker serves it now."""
        return any(worker.state is WorkerState.READY for worker in self.workers)

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and are not answered yet, whether they wait or a worker has them."""
        return self._dispatcher.in_flight

    @property
    def queue_capacity(self) -> int:
        """Requests that may wait."""
        return self.plan.job_queue_size

    @property
    def stats(self) -> Stats:
        return self._dispatcher.stats

    def by_head(self, headers: Headers) -> ModelVersion:
        """No header makes it another one; see `Route`."""
        return self

    def has_sequence_of(self, job: Job) -> bool:
        """Whether it is a stateful model, and has the state of the sequence that the request belongs to."""
        return isinstance(self._dispatcher, SequenceDispatcher) and self._dispatcher.has_sequence_of(job)

    def scale(self, min_workers: int, max_workers: int) -> Coroutine[Any, Any, None]:
        """Have the minimum of workers at least and the maximum at most, as `Supervisor.scale` does.

        Raises BadRequest at once, LoadFailed when awaited.
        """
        check_workers(min_workers)
        self.min_workers, self.max_workers = min_workers, max_workers
        return self._supervisor.scale(min(max(len(self.workers), min_workers), max_workers))

    def change(self, changes: Mapping[str, Any]) -> None:
        """Values for names of TUNABLE, from now on: what is on its way to a worker goes as it was."""
        self.plan = replace(self.plan, **changes)
        self.client_timeout = self.plan.client_timeout / 1000
        self._dispatcher.response_timeout = self.plan.response_timeout
        self._dispatcher.change(self.plan.limits, self.plan.bounds)
        self._supervisor.set_timeouts(self.plan.response_timeout, self.plan.startup_timeout)

    def retry_after(self) -> int | None:
        """Whole seconds until a worker serves, as far as can be told; None where none does nor is on its way."""
        seconds = self._supervisor.seconds_until_ready()
        return None if seconds is None else retry_after(0, 0.0, seconds)

    def watch(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when a worker's state may have changed."""
        self._supervisor.on_state = listener

    async def finished(self) -> None:
        """Wait until every accepted request is answered."""
        await self._dispatcher.quiet()

    def refuse_waiting(self, error: TsxError) -> None:
        self._dispatcher.refuse_waiting(error)

    async def close(self) -> None:
        """End all workers at once; what they hold is refused."""
        await self._supervisor.scale(0, drain=False)
        self._dispatcher.close()
        self.archive.close()
        if self._environment is not None:
            self._environment.close()

    def _place(self, worker: Worker) -> Place:
        workers = self.workers
        position = workers.index(worker) if worker in workers else 0  # one that ends is placed no more
        plan = self.plan
        return place_of(self._host.machine, plan.parallel, threads=plan.threads, worker=position, workers=len(workers), gpus=worker.gpus)

    def _launch(self, worker: Worker) -> Launch | None:
        use_venv, threads = bool(self.config.use_venv), self._place(worker).threads
        return launch_of(self.plan.parallel, self._environment, use_venv=use_venv, threads=threads, group=f"{self.name}_{worker.id}")

    def _load_order(self, worker: Worker) -> wire.LoadOrder:
        place, settings = self._place(worker), self._host.settings
        return wire.LoadOrder(
            model_name=self.name,
            model_version=self.version,
            model_dir=str(self.archive.directory),
            manifest=self.manifest,
            model_config=yaml.safe_dump(self.config.raw),
            handler=self.handler,
            worker=worker.id,
            gpu_id=place.gpu_id,
            batch_size=self.batch_size,
            response_timeout=self.response_timeout,
            threads=place.threads,
            cores=list(place.cores) or None,
            variables=place.variables,
            ranks=self.plan.parallel.ranks,
            gpus=len(worker.gpus),
            limit_max_image_pixels=settings.limit_max_image_pixels,
            decode_input_request=settings.decode_input_request,
            max_response_size=settings.max_response_size,
            server_version=__version__,
            envelope=self.envelope,
            output=self._host.worker_output,
            model_metrics=list(read_metrics_config(settings.metrics_config).model or ()),
            every_prediction_time=self.stats.journal is not None,
            mode=self.plan.strategy.mode,
            stateful=self.plan.strategy.terms is not None,
            sequence_headers=list(self._names),
        )


class Model:
    """The versions of one name. The first that is registered is the default until another is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[str, ModelVersion] = {}
        self.default = ""
        self.labels: dict[str, str] = {}  # other names of versions, which need not be registered
        self.split: Split | None = None  # for requests that name no version, where they are not all the default one's
