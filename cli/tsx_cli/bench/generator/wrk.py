"""wrk as the engine of a closed loop, where it is installed: quicker than ours, and knows less."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from array import array
from pathlib import Path

from tsx_archiver.storage.private_directory import temporary_place
from tsx_cli.bench.generator.http import rendered
from tsx_cli.bench.generator.plan import LoadPlan
from tsx_cli.bench.generator.result import Measured, limit
from tsx_cli.bench.model.histogram import Histogram
from tsx_cli.bench.model.results import GeneratorSide, Round
from tsx_cli.bench.workload.protocols import read_url
from tsx_cli.common.failure import CliError, UsageError

AUTO_WARM_UP = 2.0  # seconds at most: wrk does not tell how it went on, so that nothing can be found in it
PAST = 30  # seconds beyond its time after which wrk is given up

# Each request lies as a file beside the script, as it goes over the wire. The percentiles go to stderr in microseconds.
SCRIPT = """
local place, count = os.getenv("TSX_WRK_PLACE"), tonumber(os.getenv("TSX_WRK_COUNT"))
local requests, turn = {}, 0
for number = 1, count do
  local file = assert(io.open(place .. "/" .. number, "rb"))
  requests[number] = file:read("*a")
  file:close()
end
function request()
  turn = turn % count + 1
  return requests[turn]
end
function done(summary, latency, requests)
  local parts = {summary.requests, summary.duration, summary.errors.status, summary.errors.timeout, summary.errors.connect,
                 summary.errors.read + summary.errors.write, latency.mean, latency.max}
  for number = 1, 1000 do parts[#parts + 1] = latency:percentile(number / 10 - 0.05) end
  io.stderr:write("tsx " .. table.concat(parts, " ") .. "\\n")
end
"""
HEADS = 8  # numbers before the percentiles


def run_wrk(plan: LoadPlan) -> Measured:
    """wrk counts the times of all answers together: where some were not accepted, this does not tell one from the other, and says so."""
    place = read_url(plan.url)
    if place.socket:
        raise UsageError("wrk speaks TCP only: leave --engine wrk out for a unix socket")
    program = shutil.which("wrk")
    if program is None:
        raise CliError("--engine wrk: there is no wrk on this machine; install it (apt-get install wrk), or leave --engine wrk out")
    with tempfile.TemporaryDirectory(prefix="tsx-wrk-", dir=temporary_place()) as name:
        directory = Path(name)
        requests = rendered(plan)
        for number, request in enumerate(requests, 1):
            (directory / str(number)).write_bytes(request)
        (directory / "script.lua").write_text(SCRIPT)
        scheme = "https" if place.secure else "http"
        command = [
            program,
            "-t1",
            f"-c{plan.connections}",
            f"--timeout={max(1, round(plan.timeout))}s",
            "-s",
            str(directory / "script.lua"),
        ]
        command.append(f"{scheme}://{place.authority}/")
        environment = {"TSX_WRK_PLACE": name, "TSX_WRK_COUNT": str(len(requests)), "PATH": ""}
        lead = min(AUTO_WARM_UP, plan.seconds / 5) if plan.warm_up == "auto" else plan.warm_up
        if lead:
            _run(command, lead, environment)
        numbers, cpu = _run(command, plan.seconds, environment)
    return _measured(plan, numbers, cpu, max(1, round(lead)) if lead else 0)


def _run(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[list[float], float]:
    """What the script told, and the share of a core that wrk used. It takes whole seconds."""
    whole = max(1, round(seconds))
    before = _children_cpu()
    try:
        finished = subprocess.run(
            [*command[:-1], f"-d{whole}s", command[-1]], capture_output=True, text=True, env=environment, timeout=whole + PAST, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CliError(f"wrk has not ended {PAST} seconds after its time") from error
    found = re.search(r"^tsx (.*)$", finished.stderr, re.MULTILINE)
    if finished.returncode or found is None:
        told = (finished.stderr or finished.stdout).strip()[-500:]
        raise CliError(f"wrk failed: {told or f'exit code {finished.returncode}'}")
    return [float(number) for number in found[1].split()], (_children_cpu() - before) / whole


def _children_cpu() -> float:
    """Seconds of all children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _measured(plan: LoadPlan, numbers: list[float], cpu: float, lead: float) -> Measured:
    answers, duration, status, timeouts, connect, broken, mean, greatest = numbers[:HEADS]
    seconds, accepted = duration / 1e6, int(answers - status)
    histogram = Histogram()
    quantiles = numbers[HEADS:]
    each, rest = divmod(accepted, len(quantiles))
    for number, value in enumerate(quantiles):
        histogram.add([value / 1e6] * (each + (number * rest // len(quantiles) != (number + 1) * rest // len(quantiles))))
    histogram.total, histogram.greatest = mean / 1e6 * accepted, greatest / 1e6
    errors = {"not 2xx": int(status), "timeout": int(timeouts), "connect": int(connect), "closed": int(broken)}
    latency = histogram.latency()
    told = Round(
        seconds=seconds,
        sent=int(answers + timeouts + connect + broken),
        ok=accepted,
        errors={name: count for name, count in errors.items() if count},
        throughput=accepted / seconds,
        latency=latency,
        histogram=histogram.coarse(),
        warm_up_seconds=lead,
        generator=GeneratorSide(engine="wrk", cpu=cpu, limited=limit(cpu, 0.0, 0.0, latency.p99_ms)),
    )
    return Measured(told, array("L"), histogram, Histogram())
