"""A run of the benchmark: a search, then a comparison of the best configurations in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tsx_archiver.metadata.forms import REFERENCE, FormRecord
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.load.configuration import Configuration, Variant
from tsx_cli.bench.load.generator import max_connections
from tsx_cli.bench.load.results import Curve, OfferedLoad, Results, Trial, now
from tsx_cli.bench.report.journal import Journal
from tsx_cli.bench.report.verdict import conclude
from tsx_cli.bench.search import confirm as budget
from tsx_cli.bench.search.accuracy import AccuracyGuard, verdicts_of
from tsx_cli.bench.search.confirm import RAMP_SHARE, confirm, measure_ramp
from tsx_cli.bench.search.latency_curve import measure_curve
from tsx_cli.bench.search.machine import Watch, judge, quietness_note, should_repeat, summary
from tsx_cli.bench.search.options import BenchOptions, configurations
from tsx_cli.bench.search.points import best_point, choose, confirmed_best, with_round
from tsx_cli.bench.search.search import (
    GROUP_SIZE,
    MAX_CONNECTIONS,
    Proposal,
    State,
    baseline,
    faster_unmeasured,
    next_trial,
    ranking,
    unmeasured_configurations,
    variants_by_use,
)
from tsx_cli.bench.search.trial import RunningCandidate, Servers, TrialFailed, TrialTarget
from tsx_cli.common.failure import CliError
from tsx_cli.common.output import milliseconds, rounded

MAX_BATCH_BOUNDS = 1.5  # time of the longest timed batch, in multiples of the tightest bound
START_GUESS_S = 4.0  # assumed time of a server's start, before one has started


@dataclass
class Bench:
    """A run. Its `results` grow, and are consistent whenever the run is interrupted."""

    options: BenchOptions
    target: TrialTarget
    results: Results
    journal: Journal
    progress: Progress
    end_time: float  # a value of time.monotonic
    clock: Callable[[], float] = time.monotonic
    forms: Sequence[FormRecord] = ()  # the archive's forms to measure
    excluded: dict[Variant, str] = field(default_factory=dict)
    time_curve: Callable[..., Curve] = measure_curve
    watch: Callable[[list[float]], Watch] = Watch
    _start_times: list[float] = field(default_factory=list)
    # Whether each round of this process was disturbed.
    _disturbed_rounds: list[bool] = field(default_factory=list)
    _noise_probes: list[float] = field(default_factory=list)
    _running_configuration: Configuration | None = None
    _is_comparing: bool = False

    def __post_init__(self) -> None:
        self._start_time = self.clock()
        self._round_s = self.target.seconds  # the length of a round
        self.slo = self.options.bounds
        self.servers = Servers(
            self.target,
            lambda configuration: self.progress.show_activity(f"starting {configuration}"),
        )
        by_numbers = self.options.tolerance is not None or self.options.same_top is not None
        verdicts = {} if by_numbers else verdicts_of(self.forms)
        self.guard = AccuracyGuard(self.target.payloads, self.options.compare, verdicts=verdicts)
        machine = self.results.environment
        self.space = configurations(
            self.options,
            self.target.archive.config,
            machine.cores,
            len(machine.gpus),
            self.forms,
            batches=self.target.takes_batches,
        )
        for trial in self.results.trials:
            self._judge(trial)
        for curve in self.results.curves:
            self._exclude_form(curve)

    def run(self) -> None:
        """Search, compare and conclude. All servers end, whatever ends the run.

        Raises:
            CliError: The unchanged archive does not run.
        """
        ramp_s = (
            RAMP_SHARE * self.seconds_left()
            if self.options.ramp and math.isfinite(self.end_time)
            else 0.0
        )
        self.end_time -= ramp_s
        try:
            self._record_reference()
            self._measure_curves()
            self._search()
            self._confirm()
            # If the comparison leaves time over, the search continues.
            while self._search():
                self._confirm()
            self.end_time += ramp_s
            winner, _ = choose(self.ranked_trials(), self.trial, self.results.paired)
            if self.options.ramp and winner is not None and not measure_ramp(self, winner):
                too_short = (
                    "the time was too short for --ramp to find the knee; --resume with a longer"
                    " --time-limit goes on"
                )
                reason = self.trial(winner).reason
                self.note(
                    f"--ramp ended as {self.trial(winner).as_configuration()} failed:"
                    f" {_first_line(reason)}"
                    if reason
                    else too_short
                )
        finally:
            # Ctrl-C may interrupt the closing of the servers, so the results come first.
            self.finish()
            self.servers.close()

    def _search(self) -> bool:
        """Measure until the search has no further proposal; return whether the best trial is new."""
        previous_best = self.ranked_trials()[:1]
        while (proposal := next_trial(self._state())) is not None:
            self._measure(proposal)
        return self.ranked_trials()[:1] != previous_best

    def finish(self) -> None:
        """Determine the winner and the notes from the measurements."""
        results = self.results
        results.ended = now()
        for trial in results.trials:
            trial.best = confirmed_best(trial.points)
        results.faster_unmeasured = faster_unmeasured(self._state())
        self.add_unmeasured()
        winner, tied = choose(self.ranked_trials(), self.trial, results.paired)
        results.winner, results.tied = (None, []) if results.faster_unmeasured else (winner, tied)
        results.disturbed = summary(results.trials)
        results.baseline = self.baseline_trial()
        if self.guard.note:
            self.note(self.guard.note)
        if note := quietness_note(results.environment):
            self.note(note)
        curves = sum(bool(curve.disturbed) for curve in results.curves)
        if curves:
            self.note(
                f"{curves} of {len(results.curves)} curves were disturbed:"
                f" {_first_disturbance(results.curves)}"
            )
        if results.disturbed.says:
            self.note(results.disturbed.says)
        conclude(results)

    def note(self, text: str) -> None:
        if text not in self.results.notes:
            self.results.notes.append(text)

    def add_unmeasured(self) -> None:
        """Add the configurations that were not measured to the results, with the reasons."""
        for configuration, predicted, reason in unmeasured_configurations(self._state()):
            self.results.trials.append(
                Trial(
                    configuration=configuration.as_json(),
                    state="predicted",
                    reason=reason,
                    predicted=predicted,
                )
            )

    @property
    def round_seconds(self) -> float:
        return budget.round_cost(self._round_s)

    @property
    def _start_s(self) -> float:
        """The mean time in which a server starts, in seconds."""
        return (
            sum(self._start_times) / len(self._start_times) if self._start_times else START_GUESS_S
        )

    def _state(self) -> State:
        remaining_s, rounds = self.seconds_left(), self.options.rounds
        reserved = 0.0  # One configuration needs no comparison.
        if self.results.paired:
            reserved = budget.reserved_for_another(rounds, self._start_s)
        elif len(self.ranked_trials()) > 1:
            reserved = budget.reserved_for_end(
                self.options.duration, rounds, self.end_time - self._start_time, self._start_s
            )
        point_s = budget.round_cost(self.options.duration or budget.SHORT_ROUND_S)
        if self.baseline_trial() is None:  # The results need the baseline.
            remaining_s = max(remaining_s, self._start_s + point_s)
        return State(
            configurations=self.space,
            curves=self.results.curves,
            trials=self._searchable_trials(),
            slo=self.slo,
            mode=self.options.mode,
            arrivals=self.options.arrivals,
            loads=self.options.loads,
            cores=self.results.environment.cores,
            threads=self.target.archive.config.threads,
            excluded=self.excluded,
            exhaustive=self.options.exhaustive,
            seconds_left=max(0.0, remaining_s),
            seconds_reserved=reserved,
            seconds_per_point=point_s,
            seconds_to_start=self._start_s,
            running=self._running_configuration,
            max_connections=min(MAX_CONNECTIONS, max_connections()),
        )

    def _measure_curves(self) -> None:
        """Measure the curve t(n) of each variant, which the search uses for predictions.

        Without curves, the search relies on measurements only.
        """
        if not self.target.takes_batches:
            self.note(
                "its workers take each request as it comes and put them together themselves, so"
                " sizes of batches were not compared"
            )
            return
        timed_variants = {curve.variant for curve in self.results.curves}
        variants = [
            variant
            for variant in variants_by_use(self.space, self._state())
            if variant not in timed_variants
        ]
        # With one configuration per variant there is nothing to predict. Only forms are timed then,
        # since a form may not run here.
        if len(self.space) == len(variants) and not self.options.exhaustive:
            variants = [variant for variant in variants if variant.form not in (None, REFERENCE)]
        if not variants:
            return
        if any(variant.device != "cpu" for variant in variants):
            self.servers.close()  # An idle server would occupy memory of the GPU.
        curve_s, max_s = (
            budget.curve_seconds(self.seconds_left(), len(variants)),
            budget.MAX_CURVES_SHARE * self.seconds_left(),
        )
        started_at = self.clock()
        for number, variant in enumerate(variants):
            if variant in self.excluded:
                continue
            if number and (self.clock() - started_at) * (number + 1) / number > max_s:
                self.note(
                    "the time was too short to time batches of each kind of worker; a longer"
                    " --time-limit predicts more"
                )
                break
            example_configuration = next(
                configuration for configuration in self.space if configuration.variant == variant
            )
            sizes = sorted(
                {
                    configuration.batch_size
                    for configuration in self.space
                    if configuration.variant == variant
                }
            )
            single = replace(example_configuration, workers=1, batch_size=1)
            self.progress.show_activity(f"timing batches without a server: {single.worker}")
            max_batch_ms = (
                math.inf
                if self.slo is None or self.options.exhaustive
                else MAX_BATCH_BOUNDS * self.slo.tightest_ms
            )
            with self.watch(self._noise_probes) as watch:
                curve = self.time_curve(
                    self.target.archive,
                    single,
                    sizes,
                    self.target.payloads,
                    budget_seconds=curve_s,
                    most_ms=max_batch_ms,
                )
            curve.noise, curve.disturbed = (
                watch.noise,
                judge(watch.noise, self.results.environment.cores),
            )
            self.results.curves.append(curve)
            self.journal.write_curve(curve)
            self._exclude_form(curve)
            times = ", ".join(
                f"{point.batch_size}: {milliseconds(point.median_ms)}" for point in curve.points
            )
            failure_text = f"; no more, since {curve.failed}" if curve.failed else ""
            self.progress.print_line(
                f"{single.worker}, a batch takes"
                f" {times or 'no measurable time'}{_first_line(failure_text)}"
            )

    def _exclude_form(self, curve: Curve) -> None:
        """Exclude a form that does not run on this machine, for every number of threads."""
        if curve.failed and not curve.points and curve.form not in (None, REFERENCE):
            variants = {configuration.variant for configuration in self.space}
            self.excluded |= {
                variant: curve.failed for variant in variants if variant.kind == curve.variant.kind
            }
            self.note(f"the form {curve.form} is not measured: {curve.failed}")

    def _searchable_trials(self) -> list[Trial]:
        """Return the trials; if different answers are allowed, without their accuracy."""
        if not self.options.allow_different:
            return self.results.trials
        return [trial.model_copy(update={"accuracy": None}) for trial in self.results.trials]

    def _record_reference(self) -> None:
        """Record the answers of the unchanged archive.

        Raises:
            CliError: The unchanged archive does not run.
        """
        try:
            reference = baseline(self.space)
            self.guard.learn(
                self._server(Configuration(device=reference.device, form=reference.form))
            )
        except TrialFailed as error:
            raise CliError(f"{self.target.name} does not run unchanged: {error}") from error

    def _server(
        self, configuration: Configuration, *, keep_others: bool = False
    ) -> RunningCandidate:
        start_time = self.clock()
        is_running = configuration in self.servers
        candidate = self.servers.get(configuration, keep_others=keep_others)
        self._running_configuration = configuration
        if not is_running:
            self._start_times.append(self.clock() - start_time)
        return candidate

    def _measure(self, proposal: Proposal) -> None:
        position = self._trial(proposal)
        trial = self.results.trials[position]
        with self._failures(position):
            candidate = self._server(proposal.configuration)
            if trial.accuracy is None and not trial.points:
                trial.accuracy = self.guard.compare(candidate)
                if trial.accuracy is not None and self._judge(trial):
                    trial.state, trial.reason = (
                        "failed",
                        f"its answers differ: {trial.accuracy.worst}",
                    )
                    self.progress.print_line(
                        f"{trial.as_configuration()} cannot win: {trial.reason}"
                    )
                    self.journal.write_trial(position, trial)
                    return
                self.journal.write_trial(position, trial)
            self._round_s = self._search_round_s(proposal, trial)
            self.measure_load(position, candidate, proposal.offered)

    def _search_round_s(self, proposal: Proposal, trial: Trial) -> float:
        """Return the length of a round of the search, in seconds."""
        if math.isinf(self.end_time):
            return self.target.seconds
        predicted = None if proposal.predicted is None else proposal.predicted.throughput
        expected = max((point.throughput.value for point in trial.points), default=predicted)
        return budget.seconds_in_search(self.options.duration, expected, self.seconds_left())

    def measure_load(
        self, position: int, candidate: RunningCandidate, offered: OfferedLoad
    ) -> None:
        """Measure a round of the load, and repeat it once if it was disturbed.

        Raises:
            TrialFailed: The server failed.
        """
        self._round(position, candidate, offered)
        state = self._state()
        first_group_s = max(
            0, min(GROUP_SIZE, len(self.space) - 1) - len(self.results.trials) + 1
        ) * (state.seconds_to_start + state.seconds_per_point)
        if should_repeat(
            self._disturbed_rounds,
            self.seconds_left()
            - (0.0 if self._is_comparing else first_group_s + state.seconds_reserved),
            self.round_seconds,
        ):
            self._round(position, candidate, offered)

    def _round(self, position: int, candidate: RunningCandidate, offered: OfferedLoad) -> None:
        trial = self.results.trials[position]
        self.progress.show_activity(f"{trial.as_configuration()}, {offered}")
        if candidate.start is not None and candidate.start not in trial.starts:
            trial.starts.append(candidate.start)
        with self.watch(self._noise_probes) as watch:
            measurement = candidate.load(offered, self.progress.show_load, seconds=self._round_s)
        disturbed = judge(watch.noise, self.results.environment.cores)
        self._disturbed_rounds.append(bool(disturbed))
        new_round = measurement.round.model_copy(
            update={"noise": watch.noise, "disturbed": disturbed}
        )
        point_index = with_round(trial.points, offered, new_round, self.slo)
        point = trial.points[point_index]
        best = best_point(trial.points)
        if best == point_index or (best is None and point_index == 0):
            trial.stages, trial.batch_sizes, trial.usage = (
                measurement.stages,
                measurement.batch_sizes,
                measurement.usage,
            )
        trial.best = best
        self.journal.write_point(position, point_index, point)
        self.journal.write_trial(position, trial)
        if new_round.generator.limited:
            self.note(f"{trial.as_configuration()}, {offered}: {new_round.generator.limited}")
        bounds_text = (
            ""
            if point.holds
            else (
                ", which breaks the bounds"
                if self.slo and not point.error_rate
                else ", and not all were answered"
            )
        )
        figures_text = (
            f"{rounded(point.throughput.value)} requests/s, p99 {milliseconds(point.p99_ms.value)}"
        )
        if (stream := point.stream) is not None:
            times = (
                f"TTFT p99 {milliseconds(stream.ttft.p99_ms)}, TPOT p99"
                f" {milliseconds(stream.tpot.p99_ms)}"
            )
            figures_text += f", {rounded(stream.tokens_per_second)} tokens/s, {times}"
        disturbance_text = f"; disturbed: {disturbed[0]}" if disturbed else ""
        self.progress.print_line(
            f"{trial.as_configuration()}, {offered}: {figures_text}{bounds_text}{disturbance_text}"
        )

    def _trial(self, proposal: Proposal) -> int:
        for position, trial in enumerate(self.results.trials):
            if trial.as_configuration() == proposal.configuration:
                return position
        trial = Trial(configuration=proposal.configuration.as_json(), predicted=proposal.predicted)
        self.results.trials.append(trial)
        self.journal.write_trial(len(self.results.trials) - 1, trial)
        return len(self.results.trials) - 1

    @contextmanager
    def _failures(self, position: int) -> Iterator[None]:
        try:
            yield
        except TrialFailed as error:
            trial = self.results.trials[position]
            trial.state, trial.reason = "failed", str(error)
            self.servers.end(trial.as_configuration())
            self.journal.write_trial(position, trial)
            self.progress.print_line(
                f"{trial.as_configuration()} failed: {_first_line(str(error))}"
            )

    def _judge(self, trial: Trial) -> bool:
        """Tell whether a trial's answers differ from the archive's although they must not.

        The search then excludes the trial's variant, unless it is the variant of the archive.
        """
        if trial.accuracy is None or trial.accuracy.allowed or self.options.allow_different:
            return False
        configuration = trial.as_configuration()
        if (
            configuration.variant != baseline(self.space).variant
            and configuration.variant not in self.excluded
        ):
            self.excluded[configuration.variant] = f"its answers differ: {trial.accuracy.worst}"
        return True

    def _confirm(self) -> None:
        has_several, rounds = len(self.ranked_trials()) > 1, self.options.rounds
        # Usually one of the compared servers already runs.
        start_s = (budget.COMPARED - 1) * self._start_s
        self._round_s = budget.seconds_at_end(
            self.options.duration, rounds, self.seconds_left(), start_s
        )
        if not has_several and faster_unmeasured(self._state()):
            return  # There is nothing to compare or to choose.
        if (
            has_several
            and self.seconds_left()
            < self._start_s + budget.MIN_COMPARISON_ROUNDS * self.round_seconds
        ):
            return  # The time is too short for a conclusive comparison.
        self._is_comparing = True
        self.results.paired = confirm(self)
        self._is_comparing = False

    def ranked_trials(self) -> list[int]:
        """Return the positions of the trials that can win, the best one first."""
        return ranking(self.results.trials, None if self.options.allow_different else self.excluded)

    def trial(self, position: int) -> Trial:
        return self.results.trials[position]

    def baseline_trial(self) -> int | None:
        """Return the position of the baseline's trial, if it was measured."""
        reference = baseline(self.space)
        return next(
            (
                position
                for position, trial in enumerate(self.results.trials)
                if trial.as_configuration() == reference and trial.points
            ),
            None,
        )

    def measure_round(self, position: int, offered: OfferedLoad) -> bool:
        """Measure one more round while other servers run too; return whether it succeeded."""
        with self._failures(position):
            self.measure_load(
                position,
                self._server(self.results.trials[position].as_configuration(), keep_others=True),
                offered,
            )
        return self.results.trials[position].state == "measured"

    def seconds_left(self) -> float:
        return self.end_time - self.clock()


def _first_disturbance(curves: Sequence[Curve]) -> str:
    return next(curve.disturbed[0] for curve in curves if curve.disturbed)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else text
