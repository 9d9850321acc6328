"""An optimization run: it builds, verifies and measures one form after another.

Each form is measured in turn with the reference, and its result is stored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import psutil

from tsx_archiver.metadata.forms import REFERENCE
from tsx_cli.bench.commands.progress import Progress
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.results import now
from tsx_cli.bench.search.machine import Watch, quietness_note
from tsx_cli.bench.search.usage import MEBI, memory_of
from tsx_cli.bench.search.worker import StandaloneWorker, WorkerFailed, items_of, start_worker
from tsx_cli.common.failure import CliError
from tsx_cli.optimize.builder import BuildFailed, BuildTimeout, BuiltForm, FormBuilder, size_of
from tsx_cli.optimize.choose import describe_choice, judge_form, rank_forms, sort_forms, speedup_of
from tsx_cli.optimize.journal import OptimizeJournal, PastOptimization, Survey
from tsx_cli.optimize.measure import ReferenceFailed, RoundTimes, measure_pair
from tsx_cli.optimize.options import OptimizeOptions
from tsx_cli.optimize.prove import Criteria, OutOfTime, Proof
from tsx_cli.optimize.results import FormResult, OptimizeResults, SizeFigures

BUILD_FRACTION = 0.5  # fraction of the remaining time for one form
MIN_BUILD_S = 60.0  # minimum for a build if this much time remains, and for the survey always
MEASUREMENT_S = 4.0  # maximum for each batch size
NOT_REACHED = "the run ended before it was tried"


@dataclass
class Optimization:
    """An optimization run; its `results` are valid even if it is interrupted."""

    options: OptimizeOptions
    criteria: Criteria
    held_out: Sequence[Payload]
    builder: FormBuilder
    results: OptimizeResults
    journal: OptimizeJournal
    progress: Progress
    deadline: float  # time.monotonic() at the time limit
    past: PastOptimization | None = None
    _rounds: list[RoundTimes] = field(default_factory=list)
    _noise_probes: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Try all forms.

        Raises:
            CliError: The model cannot be optimized.
            UsageError: An option is wrong.
            KeyboardInterrupt: The user interrupted the run.
        """
        name = self.builder.archive.manifest.model_name
        try:
            if self.past is not None and self.past.survey is not None:
                self._list_forms(self.past.survey)
                if not any(may_be_tried(form) for form in self.results.forms):
                    return
            self.progress.show_activity("starting the model as it is")
            with start_worker(self.builder.spec()) as reference:
                self.results.reference.load_seconds = reference.load_seconds
                self.progress.show_activity("the answers of the model as it is")
                proof = Proof(
                    self.criteria, self.held_out, reference, self.deadline, self.progress.show_rows
                )
                if proof.rows < len(self.held_out):
                    self.results.notes.append(
                        f"{proof.rows} of {len(self.held_out)} held-out rows were used, as the time"
                        " was short"
                    )
                self.progress.print_line(
                    f"{name}: {proof.rows} held-out rows; a form has to keep {proof.guard.limit}"
                )
                self.progress.show_activity("finding the forms that apply")
                applies, labels = self.builder.survey(max(MIN_BUILD_S, self._remaining_s()))
                survey = Survey(
                    applies=applies, labels=labels, limit=proof.guard.limit, rows=proof.rows
                )
                self._list_forms(survey)
                self.journal.survey(survey)
                for form in self.results.forms:
                    if form.state == "not tried" and self._remaining_s() > 0:
                        self._try_form(form, reference, proof)
                self._report_untried()
        except (WorkerFailed, BuildFailed) as error:
            raise CliError(f"{name} cannot be optimized: {error}") from error
        except ReferenceFailed as error:
            directory = self.builder.forms_directory.parent
            raise CliError(
                f"the model as it is failed, which ended the run: {error}. {directory} has the"
                " results so far; --resume continues the run"
            ) from error
        finally:
            self._finish()

    def _list_forms(self, survey: Survey) -> None:
        """List the requested forms, the most promising first, with the results of the resumed run.

        Raises:
            UsageError: --forms contains an unknown form.
        """
        past = {} if self.past is None else self.past.forms
        self.results.limit, self.results.held_out_rows = survey.limit, survey.rows
        self.results.reference = past.get(REFERENCE, self.results.reference)
        self.results.forms = []
        for name in sort_forms(list(survey.applies), self.options.forms):
            reason = survey.applies[name]
            state: Literal["not applicable", "not tried"] = (
                "not applicable" if reason else "not tried"
            )
            form = FormResult(
                name=name, label=survey.labels[name], state=state, reason=reason or NOT_REACHED
            )
            self.results.forms.append(past.get(name, form))

    def _try_form(self, form: FormResult, reference: StandaloneWorker, proof: Proof) -> None:
        try:
            self._build_and_verify(form, reference, proof)
        except (OutOfTime, BuildTimeout) as error:
            form.reason = str(error)
        except (BuildFailed, WorkerFailed, OSError) as error:
            form.state, form.reason = "failed", str(error)
        if form.state != "not tried":
            self.journal.form(form)
            self.journal.form(self.results.reference)
        self.progress.print_line(outcome(form))

    def _report_untried(self) -> None:
        untried = [form for form in self.results.forms if form.state == "not tried"]
        for form in untried:
            form.reason = (
                "the time limit ended before it was built"
                if form.reason == NOT_REACHED
                else form.reason
            )
        if untried:
            subject = f"{len(untried)} forms were" if len(untried) > 1 else "One form was"
            note = (
                f"{subject} not tried, as the time limit ended; --resume with a longer --time-limit"
                " continues"
            )
            self.results.notes.append(note)
            self.progress.print_line(note)

    def _build_and_verify(
        self, form: FormResult, reference: StandaloneWorker, proof: Proof
    ) -> None:
        built_form = self._build(form)
        self._check_time("before a worker was started with it")
        self.progress.show_activity(f"{form.name}: starting a worker")
        with start_worker(self.builder.spec(built_form)) as worker:
            form.load_seconds = worker.load_seconds
            if worker.form != form.name:
                reasons = " ".join(worker.forms_passed_over).removeprefix(f"{form.name}: ")
                raise WorkerFailed(f"a worker does not run it: {reasons}")
            self.progress.show_activity(f"{form.name}: batches of all sizes")
            difference = proof.batch_difference(worker)
            form.batches_agree = difference is None
            if difference is not None:
                raise WorkerFailed(
                    f"it answers a row differently in a batch than alone: {difference}"
                )
            self.progress.show_activity(f"{form.name}: comparing answers")
            form.guard = proof.verdict(worker)
            form.sizes = self._measure(form.name, reference, worker)
            form.memory_mib = memory_of(psutil.Process(worker.pid)) / MEBI
            # The workers share pages, so their memory is measured while both run.
            self.results.reference.memory_mib = memory_of(psutil.Process(reference.pid)) / MEBI
        form.speedup, form.speedup_low, form.speedup_high, _ = speedup_of(form.sizes)
        form.state, form.reason = judge_form(form.guard, form.speedup_low)

    def _build(self, form: FormResult) -> BuiltForm:
        built_form = self.builder.find_built(form.name)
        if built_form is None:
            self.progress.show_activity(f"{form.name}: building")
            built_form = self.builder.build(
                form.name,
                min(self._remaining_s(), max(MIN_BUILD_S, BUILD_FRACTION * self._remaining_s())),
            )
        form.build_seconds = built_form.record.measured.get("build_seconds")
        form.size_mib = size_of(built_form.directory) / MEBI
        return built_form

    def _measure(
        self, name: str, reference: StandaloneWorker, worker: StandaloneWorker
    ) -> list[SizeFigures]:
        items, sizes = items_of(self.held_out), list[SizeFigures]()
        for index, size in enumerate(self.results.batch_sizes):
            self._check_time("before it was measured")
            self.progress.show_activity(f"{name}: batches of {size} beside the reference")
            remaining_sizes = len(self.results.batch_sizes) - index
            seconds = min(MEASUREMENT_S, self._remaining_s() / remaining_sizes)
            watch, cores = partial(Watch, self._noise_probes), self.results.environment.cores
            timing = measure_pair(reference, worker, items, size, seconds, watch=watch, cores=cores)
            self._rounds += timing.rounds
            sizes.append(timing.figures)
        return sizes

    def _finish(self) -> None:
        results = self.results
        results.ended = now()
        best = rank_forms(results.forms)[:1]
        results.best = best[0].name if best else None
        results.why = describe_choice(results.forms, results.batch_sizes)
        size_figures = [entry for form in results.forms for entry in form.sizes]
        for size in results.batch_sizes:
            if times := [entry.reference_ms for entry in size_figures if entry.batch_size == size]:
                median = statistics.median(times)
                figures = SizeFigures(
                    batch_size=size, median_ms=median, reference_ms=median, ratio=1, low=1, high=1
                )
                results.reference.sizes.append(figures)
        if disturbed := [entry.disturbed for entry in self._rounds if entry.disturbed]:
            results.notes.append(
                f"{len(disturbed)} of {len(self._rounds)} rounds were disturbed, the first since"
                f" {disturbed[0]}"
            )
        if note := quietness_note(results.environment):
            results.notes.append(note)

    def _remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def _check_time(self, step: str) -> None:
        if self._remaining_s() <= 0:
            raise OutOfTime(f"the time limit ended {step}")


def may_be_tried(form: FormResult) -> bool:
    """Tell whether a resumed run tries a form.

    A package that was missing (`Form.missing`) may have been installed since.
    """
    return form.state == "not tried" or (
        form.state == "not applicable" and " is not installed: " in form.reason
    )


def outcome(form: FormResult) -> str:
    """Describe the result of a form in one line."""
    speed = (
        ""
        if form.speedup is None
        else (
            f", {form.speedup:.2f} times as fast ({form.speedup_low:.2f} to"
            f" {form.speedup_high:.2f})"
        )
    )
    reason = f": {form.reason.splitlines()[0]}" if form.reason else ""
    return f"{form.name}: {form.state}{speed}{reason}"
