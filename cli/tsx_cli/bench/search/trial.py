"""A trial: one configuration, its server, its answers and its figures under load."""

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
from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.generator import LoadProgress, OnProgress, max_connections, measure
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan, recorded_rate
from tsx_cli.bench.load.results import ColdStart, OfferedLoad, Round, Stages, Usage
from tsx_cli.bench.search import usage as scrape
from tsx_cli.bench.search.server import NotStarted, ServerProcess, new_place, serving
from tsx_cli.bench.search.usage import UsageSampler
from tsx_cli.bench.search.variants import lay_out
from tsx_cli.common.client import Server
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.plugins import ComparedAnswer

START_SECONDS = 60.0  # beside what the model may take to load
OPEN_CONNECTIONS = 512  # of an open loop: requests that may be under way
MOST_COMPARED = 32


class TrialFailed(Exception):
    """A trial failed, which is a result and does not end the run; the message says why."""


class LoadMeasurement(NamedTuple):
    """The measurement of one load."""

    round: Round
    stages: Stages
    batch_sizes: dict[int, int]
    usage: list[Usage]


@dataclass(frozen=True)
class TrialTarget:
    """Data that all trials of a run share."""

    archive: OpenArchive
    payloads: Sequence[Payload]
    seconds: float
    seed: int = 0
    timeout: float = 60.0
    sizes: Mapping[str, int] = field(
        default_factory=dict
    )  # settings of the server: what is sent has to be let in
    warm_up: float | Literal["auto"] = "auto"  # seconds before those that count
    generator_cores: tuple[int, ...] = ()
    slo: Slo | None = None

    @property
    def name(self) -> str:
        return self.archive.manifest.model_name


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
        """For so many seconds, or the target's.

        Raises TrialFailed where the server did not come through it whole.
        """
        target, recorded, speed = self.target, offered.arrivals == "recorded", 1.0
        if recorded and offered.rate and (own := recorded_rate(target.payloads)):
            speed = offered.rate / own
        plan = LoadPlan(
            url=self.server.inference,
            model=target.name,
            payloads=target.payloads,
            mode=offered.mode,
            connections=(
                min(OPEN_CONNECTIONS, max_connections())
                if offered.mode == "open"
                else offered.connections
            ),
            rate=None if recorded else offered.rate,
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
        began: float | None = None

        def tell(progress: LoadProgress) -> None:
            nonlocal began
            began = time.monotonic() - progress.seconds if began is None else began
            if on_progress is not None:
                on_progress(progress)

        try:
            before = self._scrape()
            with UsageSampler(self.server.pid, gpu=self.configuration.device != "cpu") as sampler:
                result = measure(plan, on_progress=tell)
            after = self._scrape()
            self._check()
        except UsageError:
            raise
        except CliError as error:  # of the generator, which found no server, or was killed
            raise TrialFailed(error.message) from error
        except (OSError, psutil.Error) as error:
            raise TrialFailed(f"the server has exited: {self.server.last_words()}") from error
        stages = scrape.stages(before, after, result.latency.mean_ms)
        result = result.model_copy(update={"busy_ms": scrape.busy_ms(before, after)})
        return LoadMeasurement(
            result,
            stages,
            scrape.batch_sizes(before, after),
            sampler.during(began, plan.lead + plan.seconds),
        )

    def answers(self, payloads: Sequence[Payload], together: int) -> list[ComparedAnswer]:
        """To each, so many at a time, each as often as it takes to fill batches; raises TrialFailed
        where none come.
        """
        count = max(len(payloads), min(MOST_COMPARED, 2 * together) if together > 1 else 1)
        asked = [payloads[number % len(payloads)] for number in range(count)]
        try:
            with ThreadPoolExecutor(min(together, MOST_COMPARED)) as pool:
                return list(pool.map(self._ask, asked))
        except CliError as error:
            raise TrialFailed(f"{error.message}: {self.server.last_words()}") from error

    def first_answer(self) -> float | None:
        """Milliseconds of one request; None where it is refused, of which the comparison of answers
        says why.
        """
        begun = time.perf_counter()
        try:
            answer = self._ask(self.target.payloads[0])
        except CliError:
            return None
        return 1000 * (time.perf_counter() - begun) if answer.status < 300 else None

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
        """Raises TrialFailed if a worker died, which answers less than it seems to, or runs another
        form than that of the configuration.
        """
        described = json.loads(
            self.server.fetch(self.server.management, f"/models/{quote(self.target.name)}")
        )[0]
        if described["workerRestarts"]:
            raise TrialFailed(
                f"a worker died: {described.get('lastError') or self.server.last_words()}"
            )
        wanted, form = self.configuration.form, described.get("form")
        if wanted is not None and form not in (None, wanted):
            raise TrialFailed(
                f"its workers run {form} instead:"
                f" {'; '.join(described.get('formsPassedOver') or ())}"
            )


@contextmanager
def running(
    configuration: Configuration, target: TrialTarget, places: list[Path]
) -> Iterator[RunningCandidate]:
    """The directory of its files is added to `places`. Raises TrialFailed where it does not
    start.
    """
    with ExitStack() as held:
        place = held.enter_context(new_place(target.name[:20]))
        places.append(place)
        try:
            directory = lay_out(target.archive, configuration, place / "model")
            patience = (target.archive.config.startup_timeout or 120) + START_SECONDS
            begun = time.monotonic()
            server = held.enter_context(
                serving(directory, place, start_seconds=patience, more=target.sizes)
            )
        except NotStarted as error:
            raise TrialFailed(str(error)) from error
        candidate = RunningCandidate(configuration, server, target)
        candidate.start = ColdStart(
            ready_seconds=time.monotonic() - begun, first_answer_ms=candidate.first_answer()
        )
        yield candidate


class Servers:
    """The servers that run now, kept for as long as the same configuration is measured."""

    def __init__(
        self,
        target: TrialTarget,
        on_start: Callable[[Configuration], None] = lambda configuration: None,
    ) -> None:
        self.target = target
        self._on_start = on_start
        self._running: dict[Configuration, tuple[ExitStack, RunningCandidate]] = {}
        self._places: list[Path] = []

    def get(self, configuration: Configuration, *, beside: bool = False) -> RunningCandidate:
        """That of this configuration; all others end, unless it is to run beside them.

        Raises TrialFailed.
        """
        if not beside:
            for other in [each for each in self._running if each != configuration]:
                self.end(other)
        if configuration not in self._running:
            self._on_start(configuration)
            stack = ExitStack()
            self._running[configuration] = (
                stack,
                stack.enter_context(running(configuration, self.target, self._places)),
            )
        return self._running[configuration][1]

    def __contains__(self, configuration: Configuration) -> bool:
        return configuration in self._running

    def end(self, configuration: Configuration) -> None:
        found = self._running.get(configuration)
        if found is not None:
            try:
                found[0].close()
            finally:  # and not before: a second Ctrl-C has to find it
                self._running.pop(configuration, None)

    def close(self) -> None:
        for configuration in list(self._running):
            self.end(configuration)

    def abandon(self) -> None:
        """End all at once that this process has started, and leave nothing of it."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)
