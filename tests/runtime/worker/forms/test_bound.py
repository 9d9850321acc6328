"""The hardware that a form requires."""

from __future__ import annotations

import pytest
import torch

from tsx_runtime.worker.forms.bound import check_bound, describe_bound
from tsx_runtime.worker.forms.kinds import known_forms

GPU = torch.device("cuda", 0)


def set_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_engines_are_bound_to_the_gpu_that_they_were_built_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_gpu(monkeypatch, "NVIDIA L4", (8, 9))
    bound = describe_bound(known_forms()["tensorrt"], GPU)
    assert bound["gpu"] == "NVIDIA L4, compute capability 8.9"
    assert bound["extras"] == ["tensorrt"]
    assert check_bound(bound, GPU) is None
    set_gpu(monkeypatch, "NVIDIA A10G", (8, 6))
    reason = str(check_bound(bound, GPU))
    assert ("NVIDIA L4" in reason, "NVIDIA A10G" in reason) == (True, True)
    assert "this worker runs on cpu" in str(check_bound(bound, torch.device("cpu")))


def test_cuda_graphs_run_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = describe_bound(known_forms()["cuda-graphs"], GPU)
    set_gpu(monkeypatch, "NVIDIA A10G", (8, 6))
    assert check_bound(bound, GPU) is None


def test_machine_code_needs_all_instructions_of_the_compilers_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refuse other CPUs: a missing instruction would kill the process by SIGILL."""
    ice_lake = {
        "avx2": True,
        "avx512_f": True,
        "avx512_vnni": True,
        "avx512_vbmi2": True,
        "clwb": True,
        "l1": 32,
    }
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ice_lake)
    set_gpu(monkeypatch, "NVIDIA L4", (8, 9))
    forms, cpu = known_forms(), torch.device("cpu")
    code, kernels = (
        describe_bound(forms["aotinductor"], cpu),
        describe_bound(forms["openvino-int8"], cpu),
    )
    assert (
        describe_bound(forms["aotinductor"], GPU)["cpu"]
        == describe_bound(forms["tensorrt"], GPU)["cpu"]
        == code["cpu"]
    ), "its host code as well"
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {**ice_lake, "avx512_vbmi2": False, "clwb": False}
    )  # a Cascade Lake CPU
    assert "a CPU with avx512_vbmi2, which" in str(check_bound(code, cpu))
    assert check_bound(kernels, cpu) is None


def test_forms_of_torch_compile_declare_that_they_compile_at_load() -> None:
    assert all(
        form.compiles for name, form in known_forms().items() if name.split("-")[0] == "compile"
    )
