"""Runs each case of an auto-benchmark: registers the model like TorchServe's script, sends the
load, and unregisters it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tsx_cli.bench.commands import torchserve_report as logs
from tsx_cli.bench.commands import torchserve_report as tables
from tsx_cli.bench.commands.torchserve_plan import AutoBenchmarkPlan, Case
from tsx_cli.bench.load.generator import measure
from tsx_cli.bench.load.payloads import mix, read_payloads
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.protocols import read_target
from tsx_cli.bench.load.results import (
    Environment,
    ModelInfo,
    OfferedLoad,
    Point,
    Results,
    Trial,
    now,
)
from tsx_cli.bench.report import write_report
from tsx_cli.bench.search.machine import environment
from tsx_cli.bench.search.points import point_of
from tsx_cli.bench.search.server import NotStarted, new_place, serving
from tsx_cli.common.client import Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.run_directory import write_files

PILOT = 2.0  # seconds that tell how fast it is, and warm it up
LEAST = 1.0
WRITTEN = 1.2  # seconds until the logs have all: they are written twice a second
START_SECONDS = 60.0


class MeasuredServer(NamedTuple):
    """A server. `logs` is the directory of its metric logs, where it is on this machine."""

    inference: str
    management: str
    logs: Path | None = None
    token: str | None = None
    management_token: str | None = None
    certificate: str | None = None  # to trust, where its addresses are https

    def at(self, *, management: bool = False) -> Server:
        certificate = None if self.certificate is None else Path(self.certificate)
        if management:
            return Server(
                self.management,
                self.management_token or self.token,
                role="management",
                certificate=certificate,
            )
        return Server(self.inference, self.token, certificate=certificate)


def management_of(inference: str) -> str:
    """Where a server is managed that says nothing else: at the next port, as TorchServe and tsx
    have it. Raises UsageError.
    """
    place = read_target(inference)
    if place.socket:
        raise UsageError(
            f"the server at {inference} has another management address: give it with"
            " --management URL"
        )
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{'https' if place.secure else 'http'}://{host}:{place.port + 1}"


class CaseResult(NamedTuple):
    case: Case
    trial: Trial
    row: tables.Row | None  # None: it failed


def run_plan(
    plan: AutoBenchmarkPlan,
    output: Path,
    *,
    against: MeasuredServer | None,
    seconds: float,
    command: str = "",
    on_case: Callable[[int, Case], None] | None = None,
) -> dict[str, Results]:
    """Write ab_report.csv for each case, and tsx bench's own report for each model and mode.

    Raises CliError and OSError.

    A case that fails is a result: it has no ab_report.csv, and its reason is in the report. No load
    lasts longer than `seconds`. An interrupt is raised once the reports tell what there is.
    """
    started, here = now(), environment()
    done: list[CaseResult] = []
    interrupted = False
    try:
        with interruptible():
            for number, case in enumerate(plan.cases):
                if on_case is not None:
                    on_case(number, case)
                done.append(_measured(case, against, seconds))
                row = done[-1].row
                if row is not None:
                    write_files({f"{case.name}/ab_report.csv": tables.csv_text(row)}, output)
    except KeyboardInterrupt:
        interrupted = True
    groups = {
        name: [each for each in done if each.case.group == name]
        for name in dict.fromkeys(each.case.group for each in done)
    }
    found = {}
    for name, group in groups.items():
        found[name] = _results(group, against, here, started, command)
        found[name].complete = not interrupted
        write_report(found[name], output / name)
    if interrupted:
        raise KeyboardInterrupt
    return found


def _measured(case: Case, against: MeasuredServer | None, seconds: float) -> CaseResult:
    try:
        if against is not None:
            # As a server that runs takes it: a URL, or the name of a file in its model store,
            # wherever the archive lies here.
            point, place = _load(
                case, against, case.url if "://" in case.url else Path(case.url).name, seconds
            )
            time.sleep(WRITTEN)
        else:
            with new_place("torchserve") as made:
                with _own(case, made) as (server, url):
                    point, place = _load(case, server, url, seconds)
                return _done(case, point, place)  # once it has ended, all is written
    except (CliError, NotStarted) as error:
        reason = getattr(error, "message", None) or str(error)
        return CaseResult(
            case,
            Trial(configuration=case.configuration.as_json(), state="failed", reason=reason),
            None,
        )
    return _done(case, point, place)


def _done(case: Case, point: Point, place: logs.LogPosition | None) -> CaseResult:
    trial = Trial(
        configuration=case.configuration.as_json(), points=[point], best=0 if point.holds else None
    )
    return CaseResult(case, trial, tables.row(case, point, logs.figures(place) if place else {}))


@contextmanager
def _own(case: Case, place: Path) -> Iterator[tuple[MeasuredServer, str]]:
    """A tsx that may load this archive, and the address to load it by."""
    local = Path(case.url.removeprefix("file://"))
    more: dict[str, object] = {
        "metrics_mode": "log",
        "log_location": place / "logs",
        "metric_time_interval": 1,
    }
    if "://" in case.url and not case.url.startswith("file://"):
        more["allowed_urls"] = urlsplit(case.url).hostname or ""
        url = case.url
    else:
        if not local.exists():
            raise CliError(
                f"{case.url} does not exist; give the path of an archive, or its http(s) or s3 URL"
            )
        more["model_store"], url = local.absolute().parent, local.name
    if case.device == "cpu":
        more["number_of_gpu"] = 0
    with serving(None, place, start_seconds=START_SECONDS, more=more) as server:
        yield MeasuredServer(server.inference, server.management, place / "logs"), url


def _load(
    case: Case, running: MeasuredServer, url: str, seconds: float
) -> tuple[Point, logs.LogPosition | None]:
    """The load, and where the logs tell of it. Raises CliError."""
    server = running.at(management=True)
    asked = {
        "model_name": case.served_as,
        "initial_workers": case.workers,
        "batch_size": case.batch_size,
        "max_batch_delay": case.batch_delay,
    }
    server.call("POST", path("models", url=url, synchronous=True, **asked)).body()
    try:
        payloads = read_payloads([case.input], content_type=case.content_type)
        offered = OfferedLoad(connections=case.concurrency)
        plan = LoadPlan(
            *(running.inference, case.served_as, payloads, "torchserve"),
            connections=case.concurrency,
            token=running.token,
            certificate=running.certificate,
        )
        pilot = measure(replace(plan, seconds=PILOT))
        if not pilot.ok:
            raise CliError(f"no request was accepted: {pilot.errors or 'no answer came'}")
        time.sleep(WRITTEN)
        place = logs.begin(running.logs) if running.logs is not None else None
        result = measure(
            replace(plan, seconds=length_of(case.requests, pilot.throughput, seconds), warm_up=0.0)
        )
        return point_of(offered, [result], None), place
    finally:
        server.call("DELETE", path("models", case.served_as)).body()


def length_of(requests: int, rate: float, most: float) -> float:
    """Seconds that so many requests take; the rate is 0 where each takes longer than the pilot
    did.
    """
    return round(max(LEAST, min(most, requests / rate if rate else most)), 1)


def _results(
    group: Sequence[CaseResult],
    against: MeasuredServer | None,
    here: Environment,
    started: str,
    command: str,
) -> Results:
    """The cases as tsx bench has them, for its report and for `tsx bench compare`."""
    trials, case = [each.trial for each in group], group[0].case
    measured = [index for index, trial in enumerate(trials) if trial.chosen is not None]
    winner = max(measured, key=lambda index: trials[index].points[0].throughput.value, default=None)
    plain = next(
        (
            index
            for index, each in enumerate(group)
            if (each.case.workers, each.case.batch_size) == (1, 1)
        ),
        None,
    )
    return Results(
        started=started,
        ended=now(),
        command=command,
        model=ModelInfo(name=f"{case.model} ({case.mode})", archive=case.url),
        against=None if against is None else against.inference,
        protocol="torchserve",
        environment=here,
        inputs=mix(read_payloads([case.input], content_type=case.content_type), str(case.input)),
        trials=trials,
        winner=winner,
        baseline=plain,
        why=(
            ""
            if winner is None
            else f"Highest throughput of the loads in the file, at {case.concurrency} connections."
        ),
        notes=[
            f"{each.case.name} failed: {each.trial.reason}" for each in group if each.row is None
        ],
    )
