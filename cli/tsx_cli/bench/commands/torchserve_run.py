"""A run of the cases of an auto-benchmark file, in the way of TorchServe's auto_benchmark.py.

For each case it registers the model, applies the load, and unregisters the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tsx_cli.bench.commands import torchserve_report as report
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
from tsx_cli.bench.search.server import NotStarted, scratch_directory, serving
from tsx_cli.common.client import Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.interruption import interruptible
from tsx_cli.common.run_directory import write_files

PILOT_S = 2.0  # length of a first load, which warms the model up and shows its rate
MIN_ROUND_S = 1.0
LOG_DELAY_S = 1.2  # The server writes its logs twice a second, so this is long enough.
START_TIMEOUT_S = 60.0


class MeasuredServer(NamedTuple):
    """A server; `logs` is the directory of its metric logs, if it is on this machine."""

    inference: str
    management: str
    logs: Path | None = None
    token: str | None = None
    management_token: str | None = None
    certificate: str | None = None  # file of a certificate to trust

    def management_client(self) -> Server:
        return Server(
            self.management,
            self.management_token or self.token,
            role="management",
            certificate=None if self.certificate is None else Path(self.certificate),
        )


def management_of(inference: str) -> str:
    """Return the default management address of a server.

    Its port is one higher than that of `inference`. TorchServe and tsx have the same default.

    Raises:
        UsageError: The server listens at a Unix socket.
    """
    target = read_target(inference)
    if target.socket:
        raise UsageError(
            f"the server at {inference} has another management address: give it with"
            " --management URL"
        )
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{'https' if target.secure else 'http'}://{host}:{target.port + 1}"


class CaseResult(NamedTuple):
    case: Case
    trial: Trial
    row: report.Row | None  # None after a failure


def run_plan(
    plan: AutoBenchmarkPlan,
    output: Path,
    *,
    against: MeasuredServer | None,
    seconds: float,
    command: str = "",
    on_case: Callable[[int, Case], None] | None = None,
) -> dict[str, Results]:
    """Write ab_report.csv for each case, and a report of tsx bench for each model and mode.

    A case that fails has no ab_report.csv; its reason is in the report. No load lasts longer than
    `seconds`. An interrupt is raised again after the reports are written.

    Raises:
        CliError: The reports cannot be written.
        OSError: The reports cannot be written.
    """
    start_time, machine_environment = now(), environment()
    case_results: list[CaseResult] = []
    interrupted = False
    try:
        with interruptible():
            for number, case in enumerate(plan.cases):
                if on_case is not None:
                    on_case(number, case)
                case_results.append(_measure_case(case, against, seconds))
                row = case_results[-1].row
                if row is not None:
                    write_files({f"{case.name}/ab_report.csv": report.csv_text(row)}, output)
    except KeyboardInterrupt:
        interrupted = True
    groups = {
        name: [result for result in case_results if result.case.group == name]
        for name in dict.fromkeys(result.case.group for result in case_results)
    }
    results_by_group = {}
    for name, group in groups.items():
        results_by_group[name] = _results(group, against, machine_environment, start_time, command)
        results_by_group[name].complete = not interrupted
        write_report(results_by_group[name], output / name)
    if interrupted:
        raise KeyboardInterrupt
    return results_by_group


def _measure_case(case: Case, against: MeasuredServer | None, seconds: float) -> CaseResult:
    try:
        if against is not None:
            # A running server takes a URL, or the name of a file in its model store.
            point, log_position = _measure_load(
                case, against, case.url if "://" in case.url else Path(case.url).name, seconds
            )
            time.sleep(LOG_DELAY_S)
        else:
            with scratch_directory("torchserve") as directory:
                with _own_server(case, directory) as (server, url):
                    point, log_position = _measure_load(case, server, url, seconds)
                # There is no need to wait for the logs: a server writes them before it ends.
                return _case_result(case, point, log_position)
    except (CliError, NotStarted) as error:
        reason = getattr(error, "message", None) or str(error)
        return CaseResult(
            case,
            Trial(configuration=case.configuration.as_json(), state="failed", reason=reason),
            None,
        )
    return _case_result(case, point, log_position)


def _case_result(case: Case, point: Point, log_position: report.LogPosition | None) -> CaseResult:
    trial = Trial(
        configuration=case.configuration.as_json(), points=[point], best=0 if point.holds else None
    )
    row = report.row(case, point, report.values_since(log_position) if log_position else {})
    return CaseResult(case, trial, row)


@contextmanager
def _own_server(case: Case, directory: Path) -> Iterator[tuple[MeasuredServer, str]]:
    """Start a server that can load the archive; yield it and the URL of the archive."""
    local = Path(case.url.removeprefix("file://"))
    settings: dict[str, object] = {
        "metrics_mode": "log",
        "log_location": directory / "logs",
        "metric_time_interval": 1,
    }
    if "://" in case.url and not case.url.startswith("file://"):
        settings["allowed_urls"] = urlsplit(case.url).hostname or ""
        url = case.url
    else:
        if not local.exists():
            raise CliError(
                f"{case.url} does not exist; give the path of an archive, or its http(s) or s3 URL"
            )
        settings["model_store"], url = local.absolute().parent, local.name
    if case.device == "cpu":
        settings["number_of_gpu"] = 0
    with serving(None, directory, start_seconds=START_TIMEOUT_S, extra_settings=settings) as server:
        yield MeasuredServer(server.inference, server.management, directory / "logs"), url


def _measure_load(
    case: Case, server: MeasuredServer, url: str, seconds: float
) -> tuple[Point, report.LogPosition | None]:
    """Measure the load; return its point, and the position of the logs at the load's start.

    Raises:
        CliError: The server refused the model or all requests.
    """
    management = server.management_client()
    registration = {
        "model_name": case.served_as,
        "initial_workers": case.workers,
        "batch_size": case.batch_size,
        "max_batch_delay": case.batch_delay,
    }
    management.call("POST", path("models", url=url, synchronous=True, **registration)).body()
    try:
        payloads = read_payloads([case.input], content_type=case.content_type)
        offered = OfferedLoad(connections=case.concurrency)
        plan = LoadPlan(
            *(server.inference, case.served_as, payloads, "torchserve"),
            connections=case.concurrency,
            token=server.token,
            certificate=server.certificate,
        )
        pilot = measure(replace(plan, seconds=PILOT_S))
        if not pilot.ok:
            raise CliError(f"no request was accepted: {pilot.errors or 'no answer came'}")
        time.sleep(LOG_DELAY_S)
        log_position = report.log_position(server.logs) if server.logs is not None else None
        result = measure(
            replace(
                plan, seconds=round_seconds(case.requests, pilot.throughput, seconds), warm_up=0.0
            )
        )
        return point_of(offered, [result], None), log_position
    finally:
        management.call("DELETE", path("models", case.served_as)).body()


def round_seconds(requests: int, rate: float, max_s: float) -> float:
    """Return the length of a round with this number of requests, in seconds.

    `rate` is 0 if no request ended during the pilot load.
    """
    return round(max(MIN_ROUND_S, min(max_s, requests / rate if rate else max_s)), 1)


def _results(
    group: Sequence[CaseResult],
    against: MeasuredServer | None,
    machine_environment: Environment,
    start_time: str,
    command: str,
) -> Results:
    """Return the cases as results of tsx bench, for its report and for `tsx bench compare`."""
    trials, case = [result.trial for result in group], group[0].case
    measured_indexes = [index for index, trial in enumerate(trials) if trial.chosen is not None]
    winner = max(
        measured_indexes, key=lambda index: trials[index].points[0].throughput.value, default=None
    )
    baseline = next(
        (
            index
            for index, result in enumerate(group)
            if (result.case.workers, result.case.batch_size) == (1, 1)
        ),
        None,
    )
    return Results(
        started=start_time,
        ended=now(),
        command=command,
        model=ModelInfo(name=f"{case.model} ({case.mode})", archive=case.url),
        against=None if against is None else against.inference,
        protocol="torchserve",
        environment=machine_environment,
        inputs=mix(read_payloads([case.input], content_type=case.content_type), str(case.input)),
        trials=trials,
        winner=winner,
        baseline=baseline,
        why=(
            ""
            if winner is None
            else f"Highest throughput of the loads in the file, at {case.concurrency} connections."
        ),
        notes=[
            f"{result.case.name} failed: {result.trial.reason}"
            for result in group
            if result.row is None
        ],
    )
