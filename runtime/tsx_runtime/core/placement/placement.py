"""The placement of workers on cores, threads, GPUs and processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tsx_archiver import ModelConfig, TorchRun
from tsx_runtime.core.placement.cpu_pinning import (
    Cpu,
    Pinning,
    check_pinning,
    choose_cores,
    parse_pinning,
    read_cpus,
)
from tsx_runtime.core.placement.hardware import has_mps, visible_names
from tsx_runtime.errors import BadRequest, SettingError
from tsx_runtime.shared.cores import cpu_count

IDLE_S = 3.0  # A worker without a request for that long needs no core.

logger = logging.getLogger("tsx.places")


class Parallel(NamedTuple):
    """The processes and GPUs of one worker; by default it is a single process."""

    ranks: int = 1  # processes of a worker on this machine
    gpus: int = 1  # GPUs of a worker, if the machine has GPUs
    broadcast: bool = True  # whether every rank gets the requests, not only rank 0
    torchrun: TorchRun | None = None  # None: a single process, even with several GPUs
    threads: int | None = None  # threads of each process

    @property
    def is_group(self) -> bool:
        return self.torchrun is not None

    def arguments(self, group: str) -> tuple[str, ...]:
        """Return torchrun's arguments; `group` is a name that is unique on this machine.

        A group on one machine has no `rdzv-backend`, since worker/launch/rendezvous.py connects its
        processes.
        """
        torchrun = self.torchrun or TorchRun()
        has_several_nodes = (torchrun.nnodes or 1) > 1
        options = {
            "nnodes": torchrun.nnodes or 1,
            "nproc-per-node": self.ranks,
            "node-rank": torchrun.node_rank or 0,
            # The front end restarts the group itself, with pauses, and logs it.
            "max-restarts": 0,
            # Seconds; torch's own default is 0.1.
            "monitor-interval": torchrun.monitor_interval or None,
            "rdzv-id": group,
            "rdzv-backend": (torchrun.rdzv_backend or "c10d") if has_several_nodes else None,
            "rdzv-endpoint": torchrun.rdzv_endpoint if has_several_nodes else None,
            "rdzv-conf": torchrun.rdzv_conf if has_several_nodes else None,
        }
        return tuple(f"--{name}={value}" for name, value in options.items() if value is not None)


class Machine(NamedTuple):
    """The hardware that all workers of this server share."""

    cores: int  # cores that the server may use
    threads: int | None = None  # threads per worker, if the server has OMP_NUM_THREADS
    cpus: tuple[Cpu, ...] = ()  # the cores to which workers are pinned
    pinning: Pinning | None = None
    cuda_visible_devices: str | None = None  # the variable of the server


class WorkerPlacement(NamedTuple):
    cores: tuple[int, ...]  # empty if the worker is not pinned
    threads: int  # threads of each process within one operation
    gpu_id: int | None  # the first GPU, as the worker's process numbers it
    variables: dict[str, str]
    shares_cores: bool  # whether `CoreSharing` may change `threads`


def machine(launcher: bool, arguments: str, environ: Mapping[str, str], cores: int = 0) -> Machine:
    """Return the machine of this server; 0 `cores` means all that this process may use.

    Raises:
        SettingError: This machine cannot follow `cpu_launcher_args`.
    """
    first, _, _ = environ.get("OMP_NUM_THREADS", "").partition(",")
    threads = int(first) if first.strip().isdecimal() else None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not launcher:
        return Machine(cores or cpu_count(), threads, cuda_visible_devices=visible)
    try:
        pinning, cpus = parse_pinning(arguments), read_cpus()
        if cpus:
            check_pinning(pinning, cpus)
    except ValueError as error:
        raise SettingError(f"cpu_launcher_args cannot be {arguments!r}: {error}") from error
    if not cpus:
        logger.warning(
            "cpu_launcher_enable is on, but this system does not let a process choose its cores, so"
            " no worker is pinned"
        )
    if pinning.ignored_options:
        text = (
            "cpu_launcher_args: %s does nothing here; to preload libraries, set LD_PRELOAD for the"
            " server itself"
        )
        logger.warning(text, ", ".join(pinning.ignored_options))
    return Machine(cores or cpu_count(), threads, tuple(cpus), pinning, visible)


def parallel_of(config: ModelConfig, gpus: int) -> Parallel:
    """Return the processes and GPUs of a model's workers.

    A group of processes needs `torchrun`, or a `parallelType` of pp, tp or pptp with a
    `parallelLevel`. `custom` without `torchrun` is one process with `parallelLevel` GPUs.

    Raises:
        BadRequest: A worker needs more GPUs than there are, or several nodes have no rendezvous.
    """
    torchrun = config.torchrun
    if (
        torchrun is None
        and config.parallel_type in ("pp", "tp", "pptp")
        and (config.parallel_level or 1) > 1
    ):
        torchrun = TorchRun()
    if torchrun is None:
        parallel = Parallel(gpus=config.parallel_level or 1)
    else:
        ranks = _ranks(torchrun.nproc_per_node, config.parallel_level, gpus)
        broadcast = config.parallel_type != "pp"
        parallel = Parallel(
            ranks, config.parallel_level or ranks, broadcast, torchrun, torchrun.omp_number_threads
        )
        if (torchrun.nnodes or 1) > 1 and not torchrun.rdzv_endpoint:
            raise BadRequest(
                f"torchrun in model-config.yaml asks for {torchrun.nnodes} nodes: set rdzv-endpoint"
                " as well, the HOST:PORT where they meet."
            )
    if parallel.ranks > 1 and parallel.broadcast:
        _check_lockstep(config)
    if 0 < gpus < parallel.gpus and config.device_type != "cpu":
        raise BadRequest(
            f"A worker of this model takes {parallel.gpus} GPUs, and this server has {gpus}. "
            "Lower parallelLevel, or torchrun's nproc-per-node, in model-config.yaml."
        )
    return parallel


def placement_of(
    host: Machine,
    parallel: Parallel,
    *,
    threads: int | None,
    worker: int,
    workers: int,
    gpus: Sequence[int],
    sharing: int = 1,
) -> WorkerPlacement:
    """Return the placement of a worker; only workers without a GPU are pinned.

    A process of a group, or with several GPUs, sees only its worker's GPUs. torch numbers visible
    GPUs from 0.

    Args:
        host: The machine.
        parallel: The processes and GPUs of the worker.
        threads: The configured number of threads.
        worker: The number of the worker, from 0.
        workers: The number of the model's workers.
        gpus: The GPUs of the worker.
        sharing: The number of workers of all models, which share the server's cores.
    """
    pinned = host.pinning is not None and not gpus
    cores = (
        choose_cores(host.pinning, host.cpus, worker, workers)
        if host.pinning is not None and pinned
        else ()
    )
    threads_per_process = (
        len(cores) or max(1, host.cores // max(1, sharing, workers))
    ) // parallel.ranks
    fixed_threads = (parallel.threads if parallel.is_group else None) or threads or host.threads
    limits_visible = bool(gpus) and (parallel.is_group or parallel.gpus > 1)
    variables = (
        {"CUDA_VISIBLE_DEVICES": visible_devices(host.cuda_visible_devices, gpus)}
        if limits_visible
        else {}
    )
    gpu = 0 if limits_visible else gpus[0] if gpus else None
    return WorkerPlacement(
        cores,
        fixed_threads or max(1, threads_per_process),
        gpu,
        variables,
        not fixed_threads and not cores and not parallel.is_group,
    )


def gpus_for(device_type: str | None, gpus: int) -> int:
    """Return how many GPUs a model may use.

    A model that asks for another kind of device, such as xpu, may use at least one. Torch in the
    worker then decides whether the device exists.
    """
    if device_type == "cpu":
        return 0
    uses_other_device = device_type == "xpu" or (device_type in ("gpu", "mps") and has_mps())
    return gpus or int(uses_other_device)


def visible_devices(setting: str | None, numbers: Iterable[int]) -> str:
    """Return the `CUDA_VISIBLE_DEVICES` of a process that sees only these GPUs of the server."""
    names = None if setting is None else visible_names(setting)
    return ",".join(str(number) if names is None else names[number] for number in numbers)


def candidate_gpus(device_ids: Sequence[int], gpus: int, need: int = 1) -> list[int]:
    """Return the GPUs on which a model's workers may run: its `deviceIds`, or all.

    All are used if a given GPU does not exist, or if a worker needs more GPUs than are given.
    """
    if not device_ids:
        return list(range(gpus))
    selected = list(dict.fromkeys(device_ids))
    if gpus and (len(selected) < need or any(number >= gpus for number in selected)):
        text = (
            "deviceIds %s: the server has GPUs 0 to %d, and a worker takes %d; the model's workers"
            " are spread over all of them"
        )
        logger.warning(text, selected, gpus - 1, need)
        return list(range(gpus))
    return selected if gpus else []


def least_used(
    allowed_gpus: Sequence[int], used: Mapping[int, int], need: int = 1
) -> tuple[int, ...]:
    """Return the `need` GPUs with the fewest workers, in the order of `allowed_gpus`.

    Workers that are added one after the other are thus spread evenly.
    """
    selected = sorted(
        allowed_gpus, key=lambda number: (used.get(number, 0), allowed_gpus.index(number))
    )[:need]
    return tuple(sorted(selected, key=allowed_gpus.index))


class SharingChannel(Protocol):
    """The part of a worker's channel that `CoreSharing` uses."""

    answered: int
    threads: int
    shares_cores: bool

    @property
    def batches(self) -> int: ...

    def set_threads(self, threads: int) -> None: ...


class CoreSharing:
    """Divides the cores among the busy workers; `share` is called once a second.

    Workers with a configured number of threads keep it, and the others share the remaining cores.
    """

    def __init__(
        self,
        cores: int,
        channels: Callable[[], Iterable[SharingChannel]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Divide `cores` among the channels of all workers that serve."""
        self._cores = cores
        self._channels = channels
        self._clock = clock
        # The number of answered requests, and the time of the last activity.
        self._activity: dict[SharingChannel, tuple[int, float]] = {}

    def share(self) -> None:
        now, previous, sharing, free_cores = self._clock(), self._activity, [], self._cores
        self._activity = {}
        for channel in self._channels():
            answered, last_active = previous.get(channel, (0, now - 2 * IDLE_S))
            if channel.batches or channel.answered != answered:
                last_active = now
            self._activity[channel] = channel.answered, last_active
            if now - last_active > IDLE_S:
                continue
            if channel.shares_cores:
                sharing.append(channel)
            else:
                free_cores -= channel.threads
        for channel in sharing:
            channel.set_threads(max(1, free_cores // len(sharing)))


def _check_lockstep(config: ModelConfig) -> None:
    """Check that all ranks run the same batches in the same order, as collectives require.

    Raises:
        BadRequest: The model asks for a mode that breaks this order.
    """
    for is_set, key in (
        (config.continuous_batching, "continuousBatching"),
        (config.async_communication, "asyncCommunication"),
    ):
        if is_set:
            raise BadRequest(
                f"model-config.yaml asks for {key} and for a torchrun group whose ranks all get the"
                " requests: they would get out of sync. Leave one of them out, or use"
                " parallelType: pp, where rank 0 alone gets them."
            )


def _ranks(nproc_per_node: int | str | None, level: int | None, gpus: int) -> int:
    """Return the number of ranks for an nproc-per-node, which is a number, cpu, gpu or auto."""
    if nproc_per_node is None:
        return level or 1
    if isinstance(nproc_per_node, int):
        return nproc_per_node
    keyword = nproc_per_node.strip().lower()
    if keyword.isdecimal() and int(keyword):
        return int(keyword)
    if keyword == "cpu" or (keyword == "auto" and not gpus):
        return cpu_count()
    if keyword in ("gpu", "auto") and gpus:
        return gpus
    reason = (
        "this server has no GPU" if keyword == "gpu" else "it must be a number, cpu, gpu or auto"
    )
    raise BadRequest(
        f"nproc-per-node under torchrun in model-config.yaml is {nproc_per_node!r}: {reason}."
    )
