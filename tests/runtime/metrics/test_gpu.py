"""GPU figures, read with NVML or from the output of nvidia-smi."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import psutil
import pytest

from tsx_runtime.metrics import gpu
from tsx_runtime.metrics.gpu import Gpu, Nvml, parse, read_gpus, visible

OUTPUT = """\
0, GPU-5d0bf3f5-7b2b-4c6e-8a5a-0b8f5d9f0001, 37, 12, 678, 81559
1, GPU-a1b2c3d4-7b2b-4c6e-8a5a-0b8f5d9f0002, [N/A], [N/A], 3, 81559
"""


def test_each_line_of_nvidia_smi_is_a_gpu() -> None:
    first, second = parse(OUTPUT)
    assert (first.utilization, first.memory_used, first.memory_total) == (37, 678, 81559)
    assert second.utilization is None


def test_usage_is_reported_under_torchserves_names() -> None:
    first, second = parse(OUTPUT)
    text = (
        "gpuId::{} utilization.gpu [%]::{} % utilization.memory [%]::{} % memory.used [MiB]::{} MiB"
    )
    assert first.usage(0) == text.format(0, 37, 12, 678)
    assert second.usage(1) == text.format(1, "N/A", "N/A", 3)


def test_invalid_tool_output_gives_no_gpus() -> None:
    assert parse("No devices were found\n") == []


def test_visible_devices_select_and_order_gpus() -> None:
    gpus = parse(OUTPUT)
    assert visible(gpus, None) == {0: gpus[0], 1: gpus[1]}
    assert visible(gpus, "1,0") == {0: gpus[1], 1: gpus[0]}
    assert visible(gpus, "GPU-a1b2c3d4") == {0: gpus[1]}
    assert visible(gpus, "0,7,1") == {0: gpus[0]}
    assert visible(gpus, "") == {}


@pytest.fixture
def write_tool(tmp_path, monkeypatch):
    """Return a function that installs a script on the path as nvidia-smi."""

    def write(script):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return write


@pytest.mark.usefixtures("processes")
def test_gpus_are_read_from_the_tool(write_tool, monkeypatch):
    write_tool(f"cat <<'END'\n{OUTPUT}END")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert asyncio.run(read_gpus()) == {0: parse(OUTPUT)[1]}


@pytest.mark.usefixtures("processes")
def test_a_machine_without_the_tool_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert asyncio.run(read_gpus()) == {}


@pytest.mark.usefixtures("processes")
def test_a_hanging_tool_is_killed(write_tool, tmp_path):
    file = tmp_path / "pid"
    write_tool(f"echo $$ > {file}; exec sleep 600")
    assert asyncio.run(read_gpus(timeout_s=1.0)) == {}
    # The shell of a busy machine may not have written the file.
    if file.exists() and (pid := file.read_text()):
        assert not psutil.pid_exists(int(pid))


class FakeLibrary:
    """A fake NVML of a machine with two GPUs, one of which reports little."""

    class NVMLError(Exception):
        pass

    def __init__(self, init=lambda: None):
        self.nvmlInit = init

    def nvmlDeviceGetCount(self):  # noqa: N802  # a name of the library
        return 2

    def nvmlDeviceGetHandleByIndex(self, number):  # noqa: N802
        return number

    def nvmlDeviceGetUUID(self, device):  # noqa: N802
        # Older versions answer with bytes.
        return [b"GPU-1", "GPU-2"][device]

    def nvmlDeviceGetUtilizationRates(self, device):  # noqa: N802
        if device:
            raise self.NVMLError
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
        return SimpleNamespace(used=678 << 20, total=81559 << 20)

    def nvmlDeviceGetComputeRunningProcesses(self, device):  # noqa: N802
        return [
            SimpleNamespace(pid=11, usedGpuMemory=5),
            SimpleNamespace(pid=12, usedGpuMemory=None),
        ]


def test_nvml_is_used_if_installed(monkeypatch):
    monkeypatch.setattr(gpu, "_find_library", lambda: Nvml(FakeLibrary()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    gpus = asyncio.run(read_gpus())
    assert gpus[1] == Gpu("0", "GPU-1", 37, 12, 678, 81559, {11: 5})
    assert (gpus[0].uuid, gpus[0].utilization, gpus[0].memory_total) == ("GPU-2", None, 81559)


@pytest.mark.usefixtures("processes")
def test_without_a_driver_the_tool_is_used(write_tool, monkeypatch):
    library = FakeLibrary(init=lambda: (_ for _ in ()).throw(FakeLibrary.NVMLError()))
    monkeypatch.setattr(gpu, "_find_library", lambda: Nvml(library))
    write_tool(f"cat <<'END'\n{OUTPUT}END")
    assert asyncio.run(read_gpus()) == dict(enumerate(parse(OUTPUT)))


def test_a_hanging_driver_is_abandoned_and_not_called_again():
    may_answer, calls = threading.Event(), []

    def hang():
        calls.append(1)
        may_answer.wait(30)

    async def main():
        nvml = Nvml(FakeLibrary(init=hang))
        assert [await nvml.read(0.01), await nvml.read(0.01)] == [[], []]
        may_answer.set()
        assert len(await nvml.read(30)) == 2
        assert len(calls) == 1

    asyncio.run(main())


def test_the_installed_nvml_has_the_functions_that_are_called():
    library = pytest.importorskip("pynvml")
    for name in vars(FakeLibrary):
        if name.startswith(("nvml", "NVML")):
            assert callable(getattr(library, name)), name
    assert callable(library.nvmlInit)
