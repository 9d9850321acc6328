"""The machine's own numbers: taken when somebody reads the metrics, or told by a program of the user's every so often."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
from typing import NamedTuple

import psutil

from tsx_runtime.core.isolation.hidden_credentials import hidden_variables
from tsx_runtime.metrics.programs import output_of
from tsx_runtime.settings.schema import Settings

MEGA, GIGA = 1 << 20, 1 << 30
LONGEST_RUN = 30.0  # seconds that the user's program may take

_LINE = re.compile(r"^([A-Za-z_]\w*)\.([A-Za-z]+):(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\|#([^|]*)")

logger = logging.getLogger("tsx.metrics")


class SystemMetric(NamedTuple):
    name: str
    unit: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()  # besides those of the host


class System:
    """The settings `disable_system_metrics`, `system_metrics_cmd` and `metric_time_interval`."""

    def __init__(self, settings: Settings) -> None:
        self.disabled = settings.disable_system_metrics
        self._command = settings.system_metrics_cmd
        self._hidden = hidden_variables(settings, os.environ)
        self._interval = settings.metric_time_interval
        self._told: list[SystemMetric] = []
        if not self.disabled and not self._command:
            _read_what_there_is()  # the processor's use is measured from one reading to the next

    def read(self) -> list[SystemMetric]:
        if self.disabled:
            return []
        return self._told if self._command else _read_what_there_is()

    async def follow(self) -> None:
        """Run the user's program again and again; return at once where there is none."""
        while self._command and not self.disabled:
            await self._run(self._command)
            await asyncio.sleep(self._interval)

    async def _run(self, command: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in self._hidden}
        try:
            code, output = await output_of(shlex.split(command), LONGEST_RUN, env=env)
        except TimeoutError:
            logger.warning("system_metrics_cmd took longer than %d s, so it was ended", LONGEST_RUN)
            return
        except (OSError, ValueError) as error:
            logger.warning("system_metrics_cmd cannot be run: %s", error)
            return
        if code:
            logger.warning("system_metrics_cmd ended with %d", code)
        self._told = parse_lines(output.decode(errors="replace")) or self._told


def parse_lines(text: str) -> list[SystemMetric]:
    """Lines such as `CPUUtilization.Percent:12.5|#Level:Host|#hostname:box,timestamp:1717105307`; others are passed over."""
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line.strip()):
            pairs = (pair.partition(":")[::2] for pair in match[4].split(",") if ":" in pair)
            labels = tuple((name, value) for name, value in pairs if name != "Level")
            found.append(SystemMetric(match[1], match[2], float(match[3]), labels))
    return found


def _read_what_there_is() -> list[SystemMetric]:
    try:
        return read_system()
    except OSError:  # no descriptor is left to look with: the other metrics are told all the same
        return []


def read_system() -> list[SystemMetric]:
    """TorchServe's system metrics. The processor's use is measured since the last call; the first one yields 0."""
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
