"""The machine and the software versions of a benchmark, without importing what only a worker
needs.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import psutil

from tsx_cli.bench.model.results import Environment
from tsx_cli.bench.model.statistics import machine_noise
from tsx_runtime.core.placement.hardware import hardware
from tsx_runtime.version import __version__

NOISY = 0.05  # of a fixed computation; beyond it the report says so


def environment(*, noise: bool = True) -> Environment:
    """With `noise` it takes half a second, in which nothing else should run."""
    here = hardware()
    return Environment(
        fingerprint=here.fingerprint,
        cpu=here.cpu,
        cores=here.cores,
        memory_mib=psutil.virtual_memory().total >> 20,
        gpus=list(here.gpus),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_version("torch"),
        tsx=__version__,
        noise=machine_noise() if noise else None,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
