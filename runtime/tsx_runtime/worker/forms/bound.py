"""The bound of a built form: the machine, the device and the versions that it can run with."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

import torch

from tsx_runtime.worker.forms.form import Form

# Libraries choose their kernels by these instructions. Other kernels give results with another
# loss.
KERNEL_INSTRUCTIONS = (
    "avx2",
    "avx512_f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "sve",
    "i8mm",
    "bf16",
)
# Without either, sums of 8-bit products overflow or saturate.
VNNI_INSTRUCTIONS = {"avx512_vnni", "avx_vnni"}
# Compiled code does not depend on these: compilers do not use them unasked, and AVX10.1 only
# repeats AVX-512.
UNUSED_INSTRUCTIONS = ("aes", "avx10_1", "clflush", "clflushopt", "clwb", "sha")


def describe_bound(form: Form, device: torch.device) -> dict[str, Any]:
    """Return the form's bound on this machine, as JSON.

    `tsx deploy` reads `extras` and `compiles` when it builds images.
    """
    bound: dict[str, Any] = {"device": device.type, "machine": platform.machine()}
    if "native" in form.bound_to:
        bound["cpu"] = sorted(cpu_instructions() - set(UNUSED_INSTRUCTIONS))
    elif "cpu" in form.bound_to and device.type == "cpu":
        bound["cpu"] = [name for name in KERNEL_INSTRUCTIONS if name in cpu_instructions()]
    if "torch" in form.bound_to:
        bound["torch"] = _release(torch.__version__)
    if "gpu" in form.bound_to and device.type == "cuda":
        bound["gpu"] = _gpu_name(device)
    if "packages" in form.bound_to:
        bound["packages"] = {name: _release(_installed_version(name)) for name in form.packages}
    if form.extras:
        bound["extras"] = form.extras
    if form.compiles:
        bound["compiles"] = True
    return bound


def check_bound(bound: Mapping[str, Any], device: torch.device) -> str | None:
    """Explain why a form with this bound cannot be used here; None if it can."""
    if bound.get("device") != device.type:
        return f"it was built for {bound.get('device')}, and this worker runs on {device.type}"
    if bound.get("machine") != platform.machine():
        return f"it was built for {bound.get('machine')}, and this machine is {platform.machine()}"
    if missing_instructions := sorted(set(bound.get("cpu", ())) - cpu_instructions()):
        return (
            f"it was built for a CPU with {', '.join(missing_instructions)}, which this one lacks"
        )
    if "torch" in bound and bound["torch"] != _release(torch.__version__):
        return (
            f"it was built with torch {bound['torch']}, and this is torch"
            f" {_release(torch.__version__)}"
        )
    if "gpu" in bound and bound["gpu"] != _gpu_name(device):
        return f"it was built for {bound['gpu']}, and this GPU is {_gpu_name(device)}"
    for name, version in dict(bound.get("packages", {})).items():
        if _release(_installed_version(name)) != version:
            return (
                f"it was built with {name} {version}, and this machine has"
                f" {_installed_version(name) or 'none'}"
            )
    return None


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def cpu_instructions() -> set[str]:
    """Return torch's names of this CPU's instructions; empty if torch does not report them."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {name for name, is_present in capabilities.items() if is_present is True}


def _gpu_name(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> str:
    """Return the minor release, such as 2.13 for 2.13.0+cpu. Patch releases can share files."""
    return ".".join(version.split("+")[0].split(".")[:2])
