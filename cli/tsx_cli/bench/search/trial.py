"""A trial of one configuration: its server, its answers and its figures under load."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote

import psutil

from tsx_archiver import OpenArchive
from tsx_archiver.metadata.huggingface import GENERATION_HANDLER
from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.generator import LoadProgress, OnProgress, max_connections, measure
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan, recorded_rate
from tsx_cli.bench.load.results import ColdStart, OfferedLoad, Round, Stages, Usage
from tsx_cli.bench.search import usage as scrape
from tsx_cli.bench.search.server import NotStarted, ServerProcess, scratch_directory, serving
from tsx_cli.bench.search.usage import UsageSampler
from tsx_cli.bench.search.variants import lay_out
from tsx_cli.common.client import Server
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.plugins import ComparedAnswer

EXTRA_START_S = 60.0  # time for a start in addition to the loading of the model
OPEN_LOOP_CONNECTIONS = 512  # maximum number of concurrent requests in an open loop
MAX_COMPARED = 32


class TrialFailed(Exception):
    """A trial failed. That is a result and does not end the run; the message gives the reason."""


class LoadMeasurement(NamedTuple):
    """The measurement of one load."""

    round: Round
    stages: Stages
    batch_sizes: dict[int, int]
    usage: list[Usage]


@dataclass(frozen=True)
class TrialTarget:
    """The data that all trials of a run share."""

    archive: OpenArchive
    payloads: Sequence[Payload]
    seconds: float
    seed: int = 0
    timeout: float = 60.0
    # Size limits of the server, which must accept the payloads.
    sizes: Mapping[str, int] = field(default_factory=dict)
    warm_up: float | Literal["auto"] = "auto"  # seconds before the measurement
    generator_cores: tuple[int, ...] = ()
    slo: Slo | None = None

    @property
    def name(self) -> str:
        return self.archive.manifest.model_name

    @property
    def takes_batches(self) -> bool:
        """Whether the server forms the batches; for some models the workers form them."""
        config = self.archive.config
        return not (
            config.async_communication
            or config.continuous_batching
            or self.archive.manifest.handler == GENERATION_HANDLER
        )


@dataclass
class RunningCandidate:
    """A configuration with a running server."""

    configuration: Configuration
    server: ServerProcess
    target: TrialTarget
    start: ColdStart | None = None
    rounds: int = field(default=0)

    def load(
        self,
        offered: OfferedLoad,
        on_progress: OnProgress | None = None,
        *,
        seconds: float | None = None,
    ) -> LoadMeasurement:
        """Measure a load for `seconds`, by default the seconds of the target.

        Raises:
            TrialFailed: The server failed, or lost a worker.
        """
        target, is_recorded, speed = self.target, offered.arrivals == "recorded", 1.0
        if is_recorded and offered.rate and (recording_rate := recorded_rate(target.payloads)):
            speed = offered.rate / recording_rate
        plan = LoadPlan(
            url=self.server.inference,
            model=target.name,
            payloads=target.payloads,
            mode=offered.mode,
            connections=(
                min(OPEN_LOOP_CONNECTIONS, max_connections())
                if offered.mode == "open"
                else offered.connections
            ),
            rate=None if is_recorded else offered.rate,
            speed=speed,
            arrivals=offered.arrivals or "poisson",
            seconds=target.seconds if seconds is None else seconds,
            warm_up=target.warm_up,
            timeout=target.timeout,
            seed=target.seed + self.rounds,
            cores=target.generator_cores,
            slo=target.slo,
        )
        self.rounds += 1
        start: float | None = None

        def report(progress: LoadProgress) -> None:
            nonlocal start
            start = time.monotonic() - progress.seconds if start is None else start
            if on_progress is not None:
                on_progress(progress)

        try:
            before = self._scrape()
            with UsageSampler(self.server.pid, gpu=self.configuration.device != "cpu") as sampler:
                result = measure(plan, on_progress=report)
            after = self._scrape()
            self._check()
        except UsageError:
            raise
        except CliError as error:
            # The generator did not reach the server, or was killed.
            raise TrialFailed(error.message) from error
        except (OSError, psutil.Error) as error:
            raise TrialFailed(f"the server has exited: {self.server.log_tail()}") from error
        stages = scrape.stages(before, after, result.latency.mean_ms)
        result = result.model_copy(update={"busy_ms": scrape.busy_ms(before, after)})
        return LoadMeasurement(
            result,
            stages,
            scrape.batch_sizes(before, after),
            sampler.during(start, plan.lead + plan.seconds),
        )

    def answers(self, payloads: Sequence[Payload], together: int) -> list[ComparedAnswer]:
        """Send payloads, `together` at a time; return the answers.

        Payloads are repeated until there are enough to fill batches.

        Raises:
            TrialFailed: The server does not answer.
        """
        count = max(len(payloads), min(MAX_COMPARED, 2 * together) if together > 1 else 1)
        requests = [payloads[number % len(payloads)] for number in range(count)]
        try:
            with ThreadPoolExecutor(min(together, MAX_COMPARED)) as pool:
                return list(pool.map(self._ask, requests))
        except CliError as error:
            raise TrialFailed(f"{error.message}: {self.server.log_tail()}") from error

    def first_answer(self) -> float | None:
        """Return the time of one request in milliseconds, or None if it was refused.

        The comparison of answers reports the reason of a refusal.
        """
        start_time = time.perf_counter()
        try:
            answer = self._ask(self.target.payloads[0])
        except CliError:
            return None
        return 1000 * (time.perf_counter() - start_time) if answer.status < 300 else None

    def _ask(self, payload: Payload) -> ComparedAnswer:
        server = Server(self.server.inference, timeout=self.target.timeout)
        headers = dict(payload.headers) | (
            {"Content-Type": payload.content_type} if payload.content_type else {}
        )
        query = f"?{payload.query}" if payload.query else ""
        answer = server.send(
            "POST", f"/predictions/{quote(self.target.name)}{query}", payload.body, headers
        )
        return ComparedAnswer(
            answer.status,
            {"content-type": answer.content_type} if answer.content_type else {},
            answer.body(),
        )

    def _scrape(self) -> scrape.MetricsSnapshot:
        return scrape.parse(self.server.fetch(self.server.metrics, "/metrics"), self.target.name)

    def _check(self) -> None:
        """Check that all workers are alive: without one, the figures would be too low.

        Raises:
            TrialFailed: A worker died, or runs another form than the configuration's.
        """
        description = json.loads(
            self.server.fetch(self.server.management, f"/models/{quote(self.target.name)}")
        )[0]
        if description["workerRestarts"]:
            raise TrialFailed(
                f"a worker died: {description.get('lastError') or self.server.log_tail()}"
            )
        expected, form = self.configuration.form, description.get("form")
        if expected is not None and form not in (None, expected):
            raise TrialFailed(
                f"its workers run {form} instead:"
                f" {'; '.join(description.get('formsPassedOver') or ())}"
            )


@contextmanager
def running(
    configuration: Configuration, target: TrialTarget, directories: list[Path]
) -> Iterator[RunningCandidate]:
    """Yield a candidate with a running server; its directory is added to `directories`.

    Raises:
        TrialFailed: The server does not start.
    """
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory(target.name[:20]))
        directories.append(scratch)
        try:
            directory = lay_out(target.archive, configuration, scratch / "model")
            start_timeout_s = (target.archive.config.startup_timeout or 120) + EXTRA_START_S
            start = time.monotonic()
            server = stack.enter_context(
                serving(
                    directory, scratch, start_seconds=start_timeout_s, extra_settings=target.sizes
                )
            )
        except NotStarted as error:
            raise TrialFailed(str(error)) from error
        candidate = RunningCandidate(configuration, server, target)
        candidate.start = ColdStart(
            ready_seconds=time.monotonic() - start, first_answer_ms=candidate.first_answer()
        )
        yield candidate


class Servers:
    """The running servers. Each is kept while its configuration is measured."""

    def __init__(
        self,
        target: TrialTarget,
        on_start: Callable[[Configuration], None] = lambda configuration: None,
    ) -> None:
        self.target = target
        self._on_start = on_start
        self._running: dict[Configuration, tuple[ExitStack, RunningCandidate]] = {}
        self._directories: list[Path] = []

    def get(self, configuration: Configuration, *, keep_others: bool = False) -> RunningCandidate:
        """Return the candidate of a configuration; other servers end, unless `keep_others` is set.

        Raises:
            TrialFailed: The server does not start.
        """
        if not keep_others:
            for superseded in [active for active in self._running if active != configuration]:
                self.end(superseded)
        if configuration not in self._running:
            self._on_start(configuration)
            stack = ExitStack()
            self._running[configuration] = (
                stack,
                stack.enter_context(running(configuration, self.target, self._directories)),
            )
        return self._running[configuration][1]

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration in self._running

    def end(self, configuration: Configuration) -> None:
        entry = self._running.get(configuration)
        if entry is not None:
            try:
                entry[0].close()
            finally:  # It is removed last: after a Ctrl-C here, `close` still finds it.
                self._running.pop(configuration, None)

    def close(self) -> None:
        for configuration in list(self._running):
            self.end(configuration)

    def abandon(self) -> None:
        """Kill all descendants of this process, and remove the servers' directories."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
