"""System metrics, measured on demand or printed by the program in `system_metrics_cmd`."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from tsx_runtime.core.hidden_credentials import hidden_variables
from tsx_runtime.settings.schema import Settings

MEGA, GIGA = 1 << 20, 1 << 30
MAX_RUN_S = 30.0  # time limit of the user's program

_LINE = re.compile(r"^([A-Za-z_]\w*)\.([A-Za-z]+):(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\|#([^|]*)")

logger = logging.getLogger("tsx.metrics")


class SystemMetric(NamedTuple):
    name: str
    unit: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()  # added to the host's labels


class System:
    """The source of system metrics.

    Its settings are `disable_system_metrics`, `system_metrics_cmd` and `metric_time_interval`.
    """

    def __init__(self, settings: Settings) -> None:
        self.disabled = settings.disable_system_metrics
        self._command = settings.system_metrics_cmd
        self._hidden_variables = hidden_variables(settings, os.environ)
        self._interval = settings.metric_time_interval
        self._printed_metrics: list[SystemMetric] = []
        if not self.disabled and not self._command:
            _read_if_possible()  # starts the first interval of the CPU utilization

    def read(self) -> list[SystemMetric]:
        if self.disabled:
            return []
        return self._printed_metrics if self._command else _read_if_possible()

    async def follow(self) -> None:
        """Run the user's program at intervals; return at once if none is configured."""
        while self._command and not self.disabled:
            await self._run(self._command)
            await asyncio.sleep(self._interval)

    async def _run(self, command: str) -> None:
        env = {
            name: value for name, value in os.environ.items() if name not in self._hidden_variables
        }
        try:
            code, output = await run_program(shlex.split(command), MAX_RUN_S, env=env)
        except TimeoutError:
            logger.warning("system_metrics_cmd took longer than %d s, so it was stopped", MAX_RUN_S)
            return
        except (OSError, ValueError) as error:
            logger.warning("system_metrics_cmd cannot be run: %s", error)
            return
        if code:
            logger.warning("system_metrics_cmd ended with %d", code)
        self._printed_metrics = (
            parse_lines(output.decode(errors="replace")) or self._printed_metrics
        )


def parse_lines(text: str) -> list[SystemMetric]:
    """Parse the lines of the user's program and skip lines of another form.

    A line is `CPUUtilization.Percent:12.5|#Level:Host|#hostname:box,timestamp:1717105307`.
    """
    metrics = []
    for line in text.splitlines():
        if match := _LINE.match(line.strip()):
            pairs = (pair.partition(":")[::2] for pair in match[4].split(",") if ":" in pair)
            labels = tuple((name, value) for name, value in pairs if name != "Level")
            metrics.append(SystemMetric(match[1], match[2], float(match[3]), labels))
    return metrics


def _read_if_possible() -> list[SystemMetric]:
    try:
        return read_system()
    except OSError:  # If no file descriptor is left, the other metrics are still served.
        return []


def read_system() -> list[SystemMetric]:
    """Return TorchServe's system metrics.

    The CPU utilization is that since the last call; the first call returns 0.
    """
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage("/")
    return [
        SystemMetric("CPUUtilization", "Percent", psutil.cpu_percent()),
        SystemMetric("MemoryUsed", "Megabytes", memory.used / MEGA),
        SystemMetric("MemoryAvailable", "Megabytes", memory.available / MEGA),
        SystemMetric("MemoryUtilization", "Percent", memory.percent),
        SystemMetric("DiskUsage", "Gigabytes", disk.used / GIGA),
        SystemMetric("DiskAvailable", "Gigabytes", disk.free / GIGA),
        SystemMetric("DiskUtilization", "Percent", disk.percent),
    ]


async def run_program(
    command: Sequence[str],
    timeout_s: float,
    *,
    drop_stderr: bool = False,
    env: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """Run a program and return its exit code and its stdout.

    The program is killed after `timeout_s` and when this call is cancelled. `drop_stderr` drops its
    stderr. By default it gets the environment of this process.

    Raises:
        OSError: The program cannot be started.
        TimeoutError: It ran for longer than `timeout_s`.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL if drop_stderr else None, env=env
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except asyncio.TimeoutError:  # In Python 3.10 this is not the built-in TimeoutError.
        raise TimeoutError from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output
