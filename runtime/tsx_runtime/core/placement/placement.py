"""The placement of a worker: cores, threads, GPUs and processes, decided from the model's needs and the machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tsx_runtime.core.placement.cpu_pinning import Cpu, Pinning, check_pinning, choose_cores, parse_pinning, read_cpus
from tsx_runtime.core.placement.devices import visible_devices
from tsx_runtime.core.placement.parallelism import Parallel
from tsx_runtime.errors import SettingError
from tsx_runtime.shared.cores import cpu_count

logger = logging.getLogger("tsx.places")


class Machine(NamedTuple):
    """The hardware that all workers of this server share."""

    cores: int  # that it may use
    threads: int | None = None  # of each worker, by the server's own OMP_NUM_THREADS
    cpus: tuple[Cpu, ...] = ()  # which these are; looked for only to pin workers
    pinning: Pinning | None = None
    visible: str | None = None  # the server's own CUDA_VISIBLE_DEVICES


class WorkerPlacement(NamedTuple):
    cores: tuple[int, ...]  # empty: not pinned
    threads: int  # of each process, within one operation
    gpu_id: int | None  # the first, as the worker numbers those that it sees
    variables: dict[str, str]
    shares_cores: bool  # `threads` is its share of the machine's cores, and changes with it


def machine(launcher: bool, arguments: str, environ: Mapping[str, str], cores: int = 0) -> Machine:
    """`cores`: 0 for all that this process may use. Raises SettingError for `cpu_launcher_args` that this machine cannot follow."""
    first, _, _ = environ.get("OMP_NUM_THREADS", "").partition(",")
    threads = int(first) if first.strip().isdecimal() else None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not launcher:
        return Machine(cores or cpu_count(), threads, visible=visible)
    try:
        pinning, cpus = parse_pinning(arguments), read_cpus()
        if cpus:
            check_pinning(pinning, cpus)
    except ValueError as error:
        raise SettingError(f"cpu_launcher_args cannot be {arguments!r}: {error}") from error
    if not cpus:
        logger.warning("cpu_launcher_enable is on, but this system does not let a process choose its cores, so no worker is pinned")
    if pinning.ignored:
        text = "cpu_launcher_args: %s does nothing here; to preload libraries, set LD_PRELOAD for the server itself"
        logger.warning(text, ", ".join(pinning.ignored))
    return Machine(cores or cpu_count(), threads, tuple(cpus), pinning, visible)


def placement_of(
    here: Machine, parallel: Parallel, *, threads: int | None, worker: int, workers: int, gpus: Sequence[int], sharing: int = 1
) -> WorkerPlacement:
    """For worker number `worker`, from 0, of so many, of `sharing` in the server. Only workers without a GPU are pinned.

    A process that is given several GPUs, or is one of several, sees only its worker's: torch numbers what it sees from 0.
    """
    pinned = here.pinning is not None and not gpus
    cores = choose_cores(here.pinning, here.cpus, worker, workers) if here.pinning is not None and pinned else ()
    share = (len(cores) or max(1, here.cores // max(1, sharing, workers))) // parallel.ranks
    asked = (parallel.threads if parallel.is_group else None) or threads or here.threads
    hides = bool(gpus) and (parallel.is_group or parallel.gpus > 1)
    variables = {"CUDA_VISIBLE_DEVICES": visible_devices(here.visible, gpus)} if hides else {}
    gpu = 0 if hides else gpus[0] if gpus else None
    return WorkerPlacement(cores, asked or max(1, share), gpu, variables, not asked and not cores and not parallel.is_group)
