"""A model and its versions: an opened archive, a queue, and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tsx_archiver import ModelConfig, OpenArchive
from tsx_archiver.metadata.forms import form_precision
from tsx_runtime import wire
from tsx_runtime.core.environments.venvs import ModelEnvironment
from tsx_runtime.core.isolation.config import Sandbox, isolation_of
from tsx_runtime.core.models.benchmark_record import read_benchmark_record
from tsx_runtime.core.models.handlers import chosen_handler, handler_of
from tsx_runtime.core.models.load_order import envelope_of, load_order
from tsx_runtime.core.models.plan import RegisterOrder, VersionPlan, check_workers
from tsx_runtime.core.models.reply_cache import ReplyCache
from tsx_runtime.core.placement.placement import Machine, WorkerPlacement, placement_of
from tsx_runtime.core.scheduling.job import Headers, Job
from tsx_runtime.core.scheduling.sequence_dispatcher import HeaderNames, SequenceDispatcher
from tsx_runtime.core.scheduling.service_rate import retry_after
from tsx_runtime.core.scheduling.strategies import entrance, make_dispatcher
from tsx_runtime.core.telemetry.metric_journal import MetricJournal
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.core.workers.forked import Starter
from tsx_runtime.core.workers.launch import Launch, launch_of
from tsx_runtime.core.workers.lifecycle import SupervisionConfig
from tsx_runtime.core.workers.supervisor import Supervisor
from tsx_runtime.core.workers.worker import Worker, WorkerState
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.plugins import BatchPolicy
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.redaction import redacted


class ServerResources(NamedTuple):
    """Resources that all versions of this server share."""

    settings: Settings
    starter: Starter
    machine: Machine
    ids: Iterator[int]  # of workers
    gpus: int  # that this server uses
    choose_gpus: Callable[[VersionPlan], tuple[int, ...]]  # for one more worker
    batch_policies: Mapping[str, BatchPolicy]  # of plugins
    count_workers: Callable[[], int]  # of all versions
    worker_output: str = ""  # see `LoadOrder.output`


class ModelVersion:
    """A registered version. `submit` accepts requests at once; they wait while workers start."""

    def __init__(
        self,
        name: str,
        version: str,
        archive: OpenArchive,
        order: RegisterOrder,
        chosen: VersionPlan,
        host: ServerResources,
        environment: ModelEnvironment | None = None,
    ) -> None:
        """Raises BadRequest for an archive that no worker of this server can run."""
        settings = host.settings
        self.name = name
        self.version = version
        self.archive = archive
        self.plan = chosen
        self.order = order
        self.url = redacted(order.url)  # as it is shown
        self.isolation = isolation_of(settings, name)
        if self.isolation is not None and chosen.parallel.is_group:
            raise BadRequest(
                f"Model {name} runs isolated, but its model-config.yaml asks for a torchrun group, whose processes need the network. "
                f'Set isolation = "off" in [models.{name}], or remove torchrun and parallelType from model-config.yaml.'
            )
        self.envelope = envelope_of(archive, settings)
        self.runtime = order.runtime or archive.manifest.runtime
        self.handler = handler_of(archive, chosen_handler(archive, order.handler, settings.default_service_handler), self.runtime)
        self.loaded_at_startup = order.loaded_at_startup
        self.workflow = order.workflow
        self.measured = read_benchmark_record(archive.directory)
        self.changed: dict[str, Any] = {}  # limits, since it was registered
        self.scaled = order.initial_workers is not None  # the client chose the number of workers, which the archive then does not change
        self.replaced: str | None = None  # the version whose place it has taken
        self.predecessors: list[ModelVersion] = []  # whose places it has taken, and which have sequences that are not over
        self.min_workers = chosen.min_workers
        self.max_workers = chosen.max_workers
        self.client_timeout = chosen.client_timeout / 1000  # s; 0: none
        self.max_response_size = settings.max_response_size
        self._host = host
        self._environment = environment
        self._closed = False
        self._names = HeaderNames(
            settings.ts_header_key_sequence_id, settings.ts_header_key_sequence_start, settings.ts_header_key_sequence_end
        )
        self.label = label = f'Model "{name}" [Version {version}]'
        self._dispatcher = make_dispatcher(label, chosen.limits, chosen.bounds, chosen.strategy, self._names)
        self._dispatcher.response_timeout = chosen.response_timeout
        if settings.metrics_mode != "prometheus":
            self.stats.journal = MetricJournal()
        self._supervision = SupervisionConfig(
            label,
            f"`tsx models scale {name} --workers 1 --version {version}` (PUT /models/{name}/{version}?min_worker=1)",
            self._dispatcher,
            host.starter,
            self._load_order,
            self._launch,
            chosen.response_timeout,
            chosen.startup_timeout,
            chosen.max_retry_timeout,
            chosen.recycling,
            settings.heartbeat_interval,
            settings.heartbeat_timeout,
        )
        self._supervisor = Supervisor(self._supervision, ids=host.ids, next_gpus=lambda: host.choose_gpus(chosen))
        self.cache = None if chosen.cache is None else ReplyCache(chosen.cache, self._dispatcher)
        self.submit: Callable[[Job], None] = self._entrance()
        self.leave: Callable[[Job], None] = self._dispatcher.leave if self.cache is None else self.cache.leave

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
    def batch_places(self) -> int:
        """Requests that fit into a batch; 0 where a batch has one, or workers take requests while they work on others."""
        return self.plan.batch_size if self.plan.batch_size > 1 and self.plan.strategy.mode == "batch" else 0

    @property
    def workers(self) -> list[Worker]:
        return self._supervisor.workers

    @property
    def last_error(self) -> str | None:
        return self._supervision.last_error

    @property
    def pending(self) -> int:
        """Requests that wait for a worker."""
        return self._dispatcher.pending

    @property
    def ready(self) -> bool:
        """Whether a worker serves it now."""
        return any(worker.state is WorkerState.READY for worker in self.workers)

    @property
    def forms(self) -> Counter[str]:
        """How many workers run each form of the model; empty if the archive configures no forms, or no worker has loaded yet."""
        return Counter(worker.form for worker in self.workers if worker.form is not None)

    @property
    def forms_passed_over(self) -> list[str]:
        """For each form that is configured before the one that workers run, why it is not used."""
        return list(dict.fromkeys(reason for worker in self.workers for reason in worker.forms_passed_over))

    @property
    def precision(self) -> str | None:
        """That of its form, else that of the archive's configuration."""
        return next(filter(None, map(form_precision, self.forms)), None) or self.config.precision

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
        mine = isinstance(self._dispatcher, SequenceDispatcher) and self._dispatcher.has_sequence_of(job)
        return mine or any(old.carries(job) for old in self.predecessors)

    def carries(self, job: Job) -> bool:
        """As above, but for sequences that it lost."""
        mine = isinstance(self._dispatcher, SequenceDispatcher) and self._dispatcher.carries(job)
        return mine or any(old.carries(job) for old in self.predecessors)

    def learn_losses_of(self, old: ModelVersion) -> None:
        """Report sequences that the old one lost, or will lose, to their clients."""
        if isinstance(self._dispatcher, SequenceDispatcher) and isinstance(old._dispatcher, SequenceDispatcher):
            self._dispatcher.sequences.share_losses(old._dispatcher.sequences)

    def continue_counts(self, old: ModelVersion) -> None:
        """Of the same version: its metrics go on where the old one's are, and have both while that is not over."""
        self._dispatcher.continue_counts(old._dispatcher.stats)

    def redirect(self, submit: Callable[[Job], None], leave: Callable[[Job], None]) -> None:
        """Have requests, and the clients that leave, go there from now on: the version is replaced, or has replaced another."""
        self.submit, self.leave = submit, leave

    def scale(self, min_workers: int, max_workers: int) -> Coroutine[Any, Any, None]:
        """Have the minimum of workers at least and the maximum at most, as `Supervisor.scale` does.

        Raises BadRequest at once, LoadFailed when awaited.
        """
        check_workers(min_workers)
        self.min_workers, self.max_workers = min_workers, max_workers
        return self._supervisor.scale(min(max(len(self.workers), min_workers), max_workers))

    def change(self, changes: Mapping[str, Any]) -> None:
        """Values for names of CHANGEABLE, from now on: what is on its way to a worker goes as it was."""
        before, self.plan = self.plan, replace(self.plan, **changes)
        if bool(before.response_timeout) != bool(self.plan.response_timeout):
            self.submit = self._entrance()
        if self.cache is not None:
            self.cache.clear()
        self.changed |= changes
        self.client_timeout = self.plan.client_timeout / 1000
        self._dispatcher.response_timeout = self.plan.response_timeout
        self._dispatcher.change(self.plan.limits, self.plan.bounds)
        self._supervision.set_timeouts(self.plan.response_timeout, self.plan.startup_timeout)

    def retry_after(self) -> int | None:
        """Whole seconds until a worker serves, as far as is known; None where no worker serves or is starting."""
        seconds = self._supervisor.seconds_until_ready()
        return None if seconds is None else retry_after(0, 0.0, seconds)

    def watch(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when a worker's state may have changed."""
        self._supervisor.on_state = listener

    async def finished(self) -> None:
        """Wait until every accepted request is answered."""
        await self._dispatcher.wait_idle()

    async def over(self) -> None:
        """Wait until every accepted request is answered, and no sequence is under way."""
        await self._dispatcher.wait_drained()

    def note_error(self, text: str) -> None:
        """What is to stand in its description."""
        self._supervision.last_error = text

    def refuse_waiting(self, error: TsxError) -> None:
        self._dispatcher.refuse_waiting(error)

    async def close(self) -> None:
        """End all workers at once; what they hold is refused."""
        if self._closed:
            return
        self._closed = True
        await self._supervisor.scale(0, drain=False)
        self._dispatcher.close()
        if self.cache is not None:
            self.cache.clear()
        self.archive.close()
        if self._environment is not None:
            self._environment.close()

    def _entrance(self) -> Callable[[Job], None]:
        submit = entrance(self._dispatcher, self.plan.strategy, self.plan.response_timeout)
        return submit if self.cache is None else self.cache.before(submit)

    def _place(self, worker: Worker) -> WorkerPlacement:
        workers = self.workers
        position = workers.index(worker) if worker in workers else 0  # one that ends is placed no more
        plan = self.plan
        return placement_of(
            self._host.machine,
            plan.parallel,
            threads=plan.threads,
            worker=position,
            workers=len(workers),
            gpus=worker.gpus,
            sharing=self._host.count_workers(),
        )

    def _launch(self, worker: Worker) -> Launch | None:
        use_venv, threads = bool(self.config.use_venv), self._place(worker).threads
        group, sandbox = f"{self.name}_{worker.id}", self._sandbox(worker)
        return launch_of(self.plan.parallel, self._environment, use_venv=use_venv, threads=threads, group=group, sandbox=sandbox)

    def _sandbox(self, worker: Worker) -> Sandbox | None:
        if self.isolation is None:
            return None
        readable = [str(self.archive.directory), *([] if self._environment is None else [str(self._environment.directory)])]
        label = f"W-{worker.id}-{self.name}_{self.version}"
        return Sandbox(self.isolation, readable, gpu=bool(worker.gpus), output=self._host.worker_output, label=label)

    def _load_order(self, worker: Worker) -> wire.LoadOrder:
        place, settings = self._place(worker), self._host.settings
        return load_order(
            self.archive,
            self.plan,
            place,
            settings,
            name=self.name,
            version=self.version,
            handler=self.handler,
            envelope=self.envelope,
            worker=worker.id,
            gpus=len(worker.gpus),
            output=self._host.worker_output,
        )


class Model:
    """The versions of one name. The first registered one is the default until another is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.versions: dict[str, ModelVersion] = {}
        self.default = ""
        self.labels: dict[str, str] = {}  # other names of versions, which need not be registered
