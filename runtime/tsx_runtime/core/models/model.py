"""A model and its versions: an opened archive, a queue, and workers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_archiver import ModelConfig, OpenArchive
from tsx_archiver.metadata.forms import form_precision
from tsx_runtime.core.models.benchmark_record import read_benchmark_record
from tsx_runtime.core.models.plan import RegisterOrder, VersionPlan, check_workers
from tsx_runtime.core.models.resources import ServerResources
from tsx_runtime.core.models.worker_setup import WorkerSetup
from tsx_runtime.core.scheduling.dispatcher import Dispatcher
from tsx_runtime.core.scheduling.job import Headers, Job
from tsx_runtime.core.scheduling.strategies import EntryPoint, entry_point, make_dispatcher
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.core.workers.launch import Launch, ModelEnvironment, Sandbox
from tsx_runtime.core.workers.lifecycle import SupervisionConfig
from tsx_runtime.core.workers.signature import InputKinds, ModelSignature
from tsx_runtime.core.workers.supervisor import Supervisor
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import BadRequest
from tsx_runtime.feature import Feature
from tsx_runtime.shared.redaction import redacted

# Seconds between two checks whether a worker is stopped, silent or due for replacement.
HEARTBEAT_INTERVAL_S = 2

logger = logging.getLogger("tsx.supervisor")


class ModelVersion:
    """A registered version. It accepts requests at once; they wait while workers start."""

    def __init__(
        self,
        name: str,
        version: str,
        archive: OpenArchive,
        order: RegisterOrder,
        plan: VersionPlan,
        host: ServerResources,
        environment: ModelEnvironment | None = None,
    ) -> None:
        """Prepare a version without workers.

        Raises:
            BadRequest: A feature excludes the configuration, or there are too many workers.
        """
        settings = host.settings
        self.name = name
        self.version = version
        self.archive = archive
        self.plan = plan
        self.order = order
        self.url = redacted(order.url)  # shown to users, without secrets
        self._setup = setup = WorkerSetup(
            name,
            version,
            archive,
            order,
            plan,
            host,
            environment,
            lambda: self.workers,
            self._sandbox,
        )
        self.envelope = setup.envelope
        self.runtime, self.handler = setup.runtime, setup.handler
        self.loaded_at_startup = order.loaded_at_startup
        self.workflow = order.workflow
        self.benchmark_record = read_benchmark_record(archive.directory)
        self.changed_limits: dict[str, Any] = {}  # limits that were changed since the registration
        # Whether a client chose the number of workers. Then a replacement keeps it.
        self.is_scaled_by_client = order.initial_workers is not None
        self.replaced_version: str | None = None  # the version that this one replaced
        self.failed_replacement: str | None = None  # the error of the last one that failed
        # Versions that this one has replaced, and that still run sequences.
        self.predecessors: list[ModelVersion] = []
        # The sources of adapters that were added since the registration, by name.
        self.added_adapters: Mapping[str, str] = {}
        # Directories that its workers read besides the archive; they may be missing.
        self.readable: Sequence[Path] = ()
        self.min_workers = plan.min_workers
        self.max_workers = plan.max_workers
        # The reason of the last automatic change of the number of workers.
        self.last_scaling: str | None = None
        self.client_timeout = plan.client_timeout / 1000  # seconds; 0: no timeout
        self.max_response_size = settings.max_response_size
        self._host = host
        self._check_workers(plan.min_workers)
        self._environment = environment
        self._closed = False
        self._loads_on_request = False  # whether a request may start a worker
        self.label = label = f'Model "{name}" [Version {version}]'
        self.dispatcher = self._make_dispatcher()
        self.dispatcher.response_timeout = plan.response_timeout
        if settings.metrics_mode != "prometheus":
            self.stats.keep_journal()
        self._supervision = SupervisionConfig(
            label,
            f"`tsx models scale {name} 1 --version {version}` (PUT"
            f" /models/{name}/{version}?min_worker=1)",
            self.dispatcher,
            host.starter,
            setup.load_order,
            setup.launch,
            plan.response_timeout,
            plan.startup_timeout,
            plan.max_retry_timeout,
            plan.recycling,
            HEARTBEAT_INTERVAL_S,
            settings.heartbeat_timeout,
            self._loading,
            must_load=order.must_load,
        )
        self._supervisor = Supervisor(
            self._supervision, ids=host.ids, next_gpus=lambda: host.choose_gpus(plan)
        )
        self.dispatcher.wake = self._wake
        self._unloaded_at = time.monotonic()  # time of the registration or of the last unloading
        # The entry point of this version; `submit` and `leave` may be redirected to another one.
        self.entry = self._entry_point()
        self.submit, self.leave = self.entry

    def _make_dispatcher(self) -> Dispatcher:
        for feature in self.features:
            if dispatcher := feature.dispatcher(self):
                return dispatcher
        return make_dispatcher(self.label, self.plan.limits, self.plan.bounds, self.plan.strategy)

    @property
    def features(self) -> Sequence[Feature]:
        """The features of the server, in the order in which requests pass through them."""
        return self._host.features

    @property
    def config(self) -> ModelConfig:
        return self.archive.config

    @property
    def manifest(self) -> dict[str, Any]:
        return self.archive.manifest.data

    @property
    def current_limits(self) -> dict[str, int]:
        """The limits that the dispatcher changes with the load; see `Dispatcher`."""
        return self.dispatcher.current_limits

    @property
    def batch_size(self) -> int:
        return self.current_limits.get("batch_size", self.plan.batch_size)

    @property
    def batch_places(self) -> int:
        """The number of requests that fit into a batch.

        It is 0 if no batches are formed: the batch size is 1, or requests join a worker's running
        ones.
        """
        return self.batch_size if self.batch_size > 1 and self.plan.strategy.mode == "batch" else 0

    @property
    def workers(self) -> list[Worker]:
        return self._supervisor.workers

    @property
    def last_error(self) -> str | None:
        return self._supervision.last_error

    @property
    def pending(self) -> int:
        """The number of requests that wait for a worker."""
        return self.dispatcher.pending

    @property
    def ready(self) -> bool:
        """Whether requests are served: a worker is ready, or a request loads the model."""
        states = [worker.state for worker in self.workers]
        return (
            self.asleep
            or WorkerState.READY in states
            or (self.dispatcher.cold_starts.is_waking and WorkerState.LOADING in states)
        )

    @property
    def asleep(self) -> bool:
        """Whether it has no worker, and the next request starts one."""
        return not self.workers and self.max_workers > 0 and self._loads_on_request

    @property
    def is_adaptive(self) -> bool:
        """Whether the load may change its number of workers."""
        return self.max_workers > self.min_workers or self.plan.scale_to_zero > 0

    @property
    def is_idle(self) -> bool:
        """Whether its workers may be unloaded.

        It has no requests, and the next request may wait until the model is loaded again.
        """
        return (
            self.dispatcher.is_unused
            and not self.plan.strategy.uses_job_tickets
            and {worker.state for worker in self.workers} <= {WorkerState.READY}
        )

    @property
    def last_used(self) -> float:
        """The time.monotonic() of the last answer, load or unloading.

        It is the current time if there are requests or sequences.
        """
        if not self.dispatcher.is_unused:
            return time.monotonic()
        return max(
            [
                max(worker.since, worker.channel.replied)
                for worker in self.workers
                if worker.channel
            ],
            default=self._unloaded_at,
        )

    @property
    def can_shrink(self) -> bool:
        """Whether workers may be removed; in a stateful model, only while it has no sequences."""
        return self.plan.strategy.sequences is None or self.dispatcher.is_unused

    def current_load(self) -> tuple[int, int, float]:
        """Return the numbers of waiting requests and busy workers, and a busy worker's rate."""
        running_batches = [
            channel.sent[0].jobs for channel in self.dispatcher.channels if channel.sent
        ]
        joins_running = (
            self.plan.strategy.mode != "batch" or self.plan.strategy.sequences is not None
        )
        waiting = self.pending if joins_running else self.in_flight - sum(map(len, running_batches))
        return waiting, len(running_batches), self.dispatcher.service_rate.rate

    @property
    def signature(self) -> ModelSignature | None:
        """The types of requests and responses; None before a worker has reported them."""
        return self._supervision.signature

    @property
    def monitor_fields(self) -> InputKinds:
        """The kinds of inputs by their paths, as the handler reports them for monitoring."""
        return self._supervision.monitor_fields

    @property
    def forms(self) -> Counter[str]:
        """The number of workers by form; empty without configured forms or loaded workers."""
        return Counter(worker.form for worker in self.workers if worker.form is not None)

    @property
    def forms_passed_over(self) -> list[str]:
        """The reasons why configured forms before the one in use were not used."""
        return list(
            dict.fromkeys(reason for worker in self.workers for reason in worker.forms_passed_over)
        )

    @property
    def precision(self) -> str | None:
        """The precision of the form in use, or else of the archive's configuration."""
        return next(filter(None, map(form_precision, self.forms)), None) or self.config.precision

    @property
    def in_flight(self) -> int:
        """The number of accepted requests without an answer, waiting or with a worker."""
        return self.dispatcher.in_flight

    @property
    def queue_capacity(self) -> int:
        """The largest number of waiting requests."""
        return self.current_limits.get("job_queue_size", self.plan.job_queue_size)

    @property
    def stats(self) -> Stats:
        return self.dispatcher.stats

    def route_for_headers(self, headers: Headers) -> ModelVersion:
        """Return this version, since it is a route that ignores the headers; see `Route`."""
        return self

    def has_sequence_of(self, job: Job) -> bool:
        """Tell whether this version runs or has lost the request's sequence."""
        return self.dispatcher.has_sequence_of(job) or any(
            old.runs_sequence_of(job) for old in self.predecessors
        )

    def runs_sequence_of(self, job: Job) -> bool:
        """Tell whether this version runs the request's sequence."""
        return self.dispatcher.runs_sequence_of(job) or any(
            old.runs_sequence_of(job) for old in self.predecessors
        )

    def redirect(self, submit: Callable[[Job], None], leave: Callable[[Job], None]) -> None:
        """Replace the functions that accept requests and that report clients who have left."""
        self.submit, self.leave = submit, leave

    def scale(self, min_workers: int, max_workers: int) -> Coroutine[Any, Any, None]:
        """Keep between `min_workers` and `max_workers` workers; see `Supervisor.scale`.

        Raises:
            BadRequest: There would be too many workers.
            LoadFailed: When awaited: a worker could not load the model.
        """
        self._check_workers(min_workers)
        self.min_workers, self.max_workers, self._loads_on_request = min_workers, max_workers, True
        return self._supervisor.scale(min(max(len(self.workers), min_workers), max_workers))

    def _check_workers(self, count: int) -> None:
        settings = self._host.settings
        owners = (
            self.config,
            settings.models.get(self.name),
            settings.model_versions.get(self.name, {}).get(self.version),
        )
        check_workers(
            count,
            self.name,
            self._host.machine.cores,
            *(owner.max_workers or 0 for owner in owners if owner),
        )

    def adapt(self, count: int, reason: str, numbers: str) -> Coroutine[Any, Any, None]:
        """Change the number of workers to `count`; log, description and metrics show the reason."""
        self.last_scaling = f"from {len(self.workers)} to {count} workers ({reason}): {numbers}"
        logger.info("%s: %s", self.label, self.last_scaling)
        self.stats.scalings[reason] += 1
        if not count:
            self._unloaded_at = time.monotonic()
        return self._supervisor.scale(count, retry=False)

    def report_no_more_workers(self, reason: str, numbers: str) -> None:
        """Report that the load needs more workers than memory or cores allow."""
        self.last_scaling = f"kept at {len(self.workers)} workers ({reason}): {numbers}"
        logger.warning("%s: %s", self.label, self.last_scaling)
        self.stats.scalings[reason] += 1

    def _wake(self) -> bool:
        if not self.asleep:
            return False
        self.dispatcher.cold_starts.begin()
        self._host.background.load(
            self.adapt(max(1, self.min_workers), "request", "the model was not loaded")
        )
        return True

    def check_changes(self, changes: Mapping[str, Any]) -> None:
        """Refuse to change parameters that exclude the latency target, or that need one.

        Raises:
            BadRequest: A parameter cannot be changed.
        """
        if names := [name for name in self.plan.unchangeable_parameters if name in changes]:
            has = (
                f"its slo is {self.plan.slo}"
                if self.plan.slo is not None
                else "it was registered without an slo"
            )
            text = (
                f"{self.label} cannot be given {', '.join(names)} while it is served, since {has}"
            )
            raise BadRequest(
                f"{text}. Register it with what you want: POST /models?url=...&replace=true&slo=..."
            )

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change limits that `check_changes` has accepted, by their names in CHANGEABLE.

        Batches that were already sent to a worker do not change.
        """
        self.plan = self._setup.plan = replace(self.plan, **changes)
        is_redirected, self.entry = self.submit != self.entry.submit, self._entry_point()
        if not is_redirected:
            self.submit, self.leave = self.entry
        self.changed_limits |= changes
        self.client_timeout = self.plan.client_timeout / 1000
        self.dispatcher.response_timeout = self.plan.response_timeout
        self.dispatcher.change(self.plan.limits, self.plan.bounds)
        self._supervision.set_timeouts(self.plan.response_timeout, self.plan.startup_timeout)

    def retry_after(self) -> int | None:
        """Estimate the whole seconds until a worker serves; None without a starting worker."""
        return self._supervisor.retry_after()

    def watch(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a worker's state may have changed."""
        self._supervisor.on_state = listener

    def note_failed_replacement(self, message: str, traceback: str | None) -> None:
        """Show in the version's description and on the page why it was not replaced."""
        self._supervision.note_error(message, traceback)
        self.failed_replacement = self.last_error

    async def close(self) -> None:
        """End all workers at once, and refuse their requests."""
        if self._closed:
            return
        self._closed, self._loads_on_request = True, False
        await self._supervisor.scale(0, drain=False)
        self.dispatcher.close()
        for feature in self.features:
            try:
                feature.end_version(self)
            except Exception:  # the boundary to the code of a plugin
                logger.exception("%s: a feature has not forgotten it", self.label)
        self.archive.close()
        if self._environment is not None:
            self._environment.close()

    def _entry_point(self) -> EntryPoint:
        """Return the functions of the dispatcher, behind those of features."""
        entry = entry_point(self.dispatcher, self.plan.strategy, self.plan.response_timeout)
        for feature in reversed(self.features):
            entry = feature.around(self, entry) or entry
        return entry

    @asynccontextmanager
    async def _loading(self, worker: Worker) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for feature in self.features:
                if context := feature.loading(self, worker):
                    await stack.enter_async_context(context)
            yield

    def _sandbox(self, worker: Worker, program: Launch) -> Sandbox | None:
        sandboxes = [
            sandbox
            for feature in self.features
            if (sandbox := feature.sandbox(self, worker, program)) is not None
        ]
        if not sandboxes:
            return None
        [sandbox] = sandboxes  # This raises an error for two sandboxes; no process starts then.
        return sandbox


class Model:
    """The versions of one name. The first one registered is the default until another is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[str, ModelVersion] = {}
        self.default = ""
        self.labels: dict[str, str] = {}  # version by label; the version need not be registered
