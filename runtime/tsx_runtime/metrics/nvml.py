"""The GPUs by NVIDIA's management library: the extra `gpu`. A reading takes a millisecond, where starting `nvidia-smi` takes hundreds."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

MEBI = 1 << 20


class Row(NamedTuple):
    """As `gpu.Gpu`."""

    number: str
    uuid: str
    utilization: float | None
    memory_utilization: float | None
    memory_used: float | None
    memory_total: float | None
    processes: dict[int, int]


class Nvml:
    """Asks in a thread of its own, one at a time: a driver that hangs must hang neither an answer nor the end of the process."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self._begun = False
        self._asked: Future[list[Row] | None] | None = None

    async def read(self, timeout: float) -> list[Row] | None:
        """None where the library does not work here; empty where the driver takes longer than `timeout` seconds."""
        if self._asked is None or self._asked.done():
            self._asked = Future()
            threading.Thread(target=self._answer, args=(self._asked,), name="tsx-nvml", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._asked)), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            return []

    def _answer(self, asked: Future[list[Row] | None]) -> None:
        try:
            asked.set_result(self._rows())
        except Exception as error:  # the thread's boundary: it is raised where somebody waits
            asked.set_exception(error)

    def _rows(self) -> list[Row] | None:
        nvml = self._library
        try:
            if not self._begun:
                nvml.nvmlInit()
                self._begun = True
            return [self._row(number) for number in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError:  # no driver, or one that has lost its device
            return None

    def _row(self, number: int) -> Row:
        nvml = self._library
        device = nvml.nvmlDeviceGetHandleByIndex(number)
        uuid = nvml.nvmlDeviceGetUUID(device)
        rates = self._told(nvml.nvmlDeviceGetUtilizationRates, device)
        memory = self._told(nvml.nvmlDeviceGetMemoryInfo, device)
        running = self._told(nvml.nvmlDeviceGetComputeRunningProcesses, device) or ()
        return Row(
            str(number),
            uuid if isinstance(uuid, str) else uuid.decode(),
            None if rates is None else float(rates.gpu),
            None if rates is None else float(rates.memory),
            None if memory is None else memory.used / MEBI,
            None if memory is None else memory.total / MEBI,
            {each.pid: int(each.usedGpuMemory) for each in running if each.usedGpuMemory is not None},
        )

    def _told(self, ask: Any, device: Any) -> Any:
        """None where this device does not tell, as a part of one (MIG) does not tell its use."""
        try:
            return ask(device)
        except self._library.NVMLError:
            return None


async def read(timeout: float) -> list[Row] | None:
    """None where the extra is not installed, or there is no driver."""
    nvml = _find()
    return None if nvml is None else await nvml.read(timeout)


@lru_cache(maxsize=1)
def _find() -> Nvml | None:
    try:
        import pynvml  # here, because it is an extra
    except ImportError:
        return None
    return Nvml(pynvml)
