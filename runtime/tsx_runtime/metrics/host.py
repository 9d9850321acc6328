"""System metrics: measured on demand, or printed by the program of `system_metrics_cmd` at
intervals.
"""

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

from tsx_runtime.core.isolation.hidden_credentials import hidden_variables
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
        self._printed: list[SystemMetric] = []
        if not self.disabled and not self._command:
            _read_or_nothing()  # the processor's use is measured from one reading to the next

    def read(self) -> list[SystemMetric]:
        if self.disabled:
            return []
        return self._printed if self._command else _read_or_nothing()

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
            logger.warning(
                "system_metrics_cmd took longer than %d s, so it was stopped", LONGEST_RUN
            )
            return
        except (OSError, ValueError) as error:
            logger.warning("system_metrics_cmd cannot be run: %s", error)
            return
        if code:
            logger.warning("system_metrics_cmd ended with %d", code)
        self._printed = parse_lines(output.decode(errors="replace")) or self._printed


def parse_lines(text: str) -> list[SystemMetric]:
    """Lines such as `CPUUtilization.Percent:12.5|#Level:Host|#hostname:box,timestamp:1717105307`;
    others are passed over.
    """
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line.strip()):
            pairs = (pair.partition(":")[::2] for pair in match[4].split(",") if ":" in pair)
            labels = tuple((name, value) for name, value in pairs if name != "Level")
            found.append(SystemMetric(match[1], match[2], float(match[3]), labels))
    return found


def _read_or_nothing() -> list[SystemMetric]:
    try:
        return read_system()
    except OSError:  # no file descriptor is left: the other metrics are given all the same
        return []


def read_system() -> list[SystemMetric]:
    """TorchServe's system metrics.

    The processor's use is measured since the last call; the first one yields 0.
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


async def output_of(
    words: Sequence[str], seconds: float, *, quiet: bool = False, env: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """A program's exit code and its stdout; `quiet` drops its stderr. `env`: this process's if not
    given.

    Raises OSError where it cannot be started, and TimeoutError after `seconds`. It is killed then,
    and when the call is cancelled.
    """
    process = await asyncio.create_subprocess_exec(
        *words, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL if quiet else None, env=env
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds)
    except asyncio.TimeoutError:  # in Python 3.10 it is not the built-in one
        raise TimeoutError from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output
