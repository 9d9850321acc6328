"""The placement of workers: cores, threads, GPUs and processes, decided from the models' needs and
the machine. Contract section 6.7.
"""

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

IDLE = 3.0  # seconds without a request after which a worker needs no core

logger = logging.getLogger("tsx.places")


class Parallel(NamedTuple):
    """A worker with one rank and without `torchrun` is a plain worker."""

    ranks: int = 1  # processes of one worker on this machine
    gpus: int = 1  # of one worker, where there are GPUs
    broadcast: bool = True  # whether every rank gets the requests; a pipeline is fed by rank 0
    torchrun: TorchRun | None = None  # None: one process, which may still see several GPUs
    threads: int | None = None  # of each process

    @property
    def is_group(self) -> bool:
        return self.torchrun is not None

    def arguments(self, group: str) -> tuple[str, ...]:
        """Return torchrun's arguments; `group` names the group among those of this machine.

        Processes on one machine have no `rdzv-backend`: they meet by worker/launch/rendezvous.py.
        """
        asked = self.torchrun or TorchRun()
        meeting = (asked.nnodes or 1) > 1
        given = {
            "nnodes": asked.nnodes or 1,
            "nproc-per-node": self.ranks,
            "node-rank": asked.node_rank or 0,
            "max-restarts": 0,  # the front end restarts a group, with pauses, and logs it
            "monitor-interval": (
                asked.monitor_interval or None
            ),  # seconds; torch's own is a tenth of one
            "rdzv-id": group,
            "rdzv-backend": (asked.rdzv_backend or "c10d") if meeting else None,
            "rdzv-endpoint": asked.rdzv_endpoint if meeting else None,
            "rdzv-conf": asked.rdzv_conf if meeting else None,
        }
        return tuple(f"--{name}={value}" for name, value in given.items() if value is not None)


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
    """`cores`: 0 for all that this process may use.

    Raises SettingError for `cpu_launcher_args` that this machine cannot follow.
    """
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
        logger.warning(
            "cpu_launcher_enable is on, but this system does not let a process choose its cores, so"
            " no worker is pinned"
        )
    if pinning.ignored:
        text = (
            "cpu_launcher_args: %s does nothing here; to preload libraries, set LD_PRELOAD for the"
            " server itself"
        )
        logger.warning(text, ", ".join(pinning.ignored))
    return Machine(cores or cpu_count(), threads, tuple(cpus), pinning, visible)


def parallel_of(config: ModelConfig, gpus: int) -> Parallel:
    """Raises BadRequest for a worker that takes more GPUs than there are, or for nodes that cannot
    meet.

    A group is asked for by `torchrun`, or by a `parallelType` of pp, tp or pptp with a
    `parallelLevel`; `custom` without `torchrun` is one process that sees as many GPUs as
    `parallelLevel` says.
    """
    asked = config.torchrun
    if (
        asked is None
        and config.parallel_type in ("pp", "tp", "pptp")
        and (config.parallel_level or 1) > 1
    ):
        asked = TorchRun()
    if asked is None:
        found = Parallel(gpus=config.parallel_level or 1)
    else:
        ranks = _ranks(asked.nproc_per_node, config.parallel_level, gpus)
        broadcast = config.parallel_type != "pp"
        found = Parallel(
            ranks, config.parallel_level or ranks, broadcast, asked, asked.omp_number_threads
        )
        if (asked.nnodes or 1) > 1 and not asked.rdzv_endpoint:
            raise BadRequest(
                f"torchrun in model-config.yaml asks for {asked.nnodes} nodes: set rdzv-endpoint as"
                " well, the HOST:PORT where they meet."
            )
    if found.ranks > 1 and found.broadcast:
        _check_step(config)
    if 0 < gpus < found.gpus and config.device_type != "cpu":
        raise BadRequest(
            f"A worker of this model takes {found.gpus} GPUs, and this server has {gpus}. "
            "Lower parallelLevel, or torchrun's nproc-per-node, in model-config.yaml."
        )
    return found


def placement_of(
    here: Machine,
    parallel: Parallel,
    *,
    threads: int | None,
    worker: int,
    workers: int,
    gpus: Sequence[int],
    sharing: int = 1,
) -> WorkerPlacement:
    """For worker number `worker`, from 0, of so many, of `sharing` in the server.

    Only workers without a GPU are pinned.

    A process that is given several GPUs, or is one of several, sees only its worker's: torch
    numbers what it sees from 0.
    """
    pinned = here.pinning is not None and not gpus
    cores = (
        choose_cores(here.pinning, here.cpus, worker, workers)
        if here.pinning is not None and pinned
        else ()
    )
    share = (len(cores) or max(1, here.cores // max(1, sharing, workers))) // parallel.ranks
    asked = (parallel.threads if parallel.is_group else None) or threads or here.threads
    hides = bool(gpus) and (parallel.is_group or parallel.gpus > 1)
    variables = {"CUDA_VISIBLE_DEVICES": visible_devices(here.visible, gpus)} if hides else {}
    gpu = 0 if hides else gpus[0] if gpus else None
    return WorkerPlacement(
        cores,
        asked or max(1, share),
        gpu,
        variables,
        not asked and not cores and not parallel.is_group,
    )


def gpus_for(device_type: str | None, gpus: int) -> int:
    """How many a model may use.

    One that asks by name for a device that is not looked for here is given one: the worker's torch
    decides.
    """
    if device_type == "cpu":
        return 0
    asked = device_type == "xpu" or (device_type in ("gpu", "mps") and has_mps())
    return gpus or int(asked)


def visible_devices(setting: str | None, numbers: Iterable[int]) -> str:
    """What `CUDA_VISIBLE_DEVICES` has to be for a process that is to see these of the server's
    devices only.
    """
    named = None if setting is None else visible_names(setting)
    return ",".join(str(number) if named is None else named[number] for number in numbers)


def candidates(device_ids: Sequence[int], gpus: int, need: int = 1) -> list[int]:
    """The GPUs that a model's workers are spread over: those it names, or all where it names one
    that is not there, or too few.
    """
    if not device_ids:
        return list(range(gpus))
    chosen = list(dict.fromkeys(device_ids))
    if gpus and (len(chosen) < need or any(number >= gpus for number in chosen)):
        text = (
            "deviceIds %s: the server has GPUs 0 to %d, and a worker takes %d; the model's workers"
            " are spread over all of them"
        )
        logger.warning(text, chosen, gpus - 1, need)
        return list(range(gpus))
    return chosen if gpus else []


def least_used(among: Sequence[int], used: Mapping[int, int], need: int = 1) -> tuple[int, ...]:
    """The GPUs for one more worker: those with the fewest workers, in their order.

    Workers that are only added go round by this.
    """
    chosen = sorted(among, key=lambda number: (used.get(number, 0), among.index(number)))[:need]
    return tuple(sorted(chosen, key=among.index))


class SharingChannel(Protocol):
    """The part of a worker's channel that is read and told here."""

    answered: int
    threads: int
    shares_cores: bool

    @property
    def batches(self) -> int: ...

    def set_threads(self, threads: int) -> None: ...


class CoreSharing:
    """`share` is called once a second.

    Workers whose number of threads was configured keep it, and the others share the rest.
    """

    def __init__(
        self,
        cores: int,
        channels: Callable[[], Iterable[SharingChannel]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`channels`: of all workers that serve."""
        self._cores = cores
        self._channels = channels
        self._clock = clock
        self._seen: dict[
            SharingChannel, tuple[int, float]
        ] = {}  # answered requests, and when it was last at work

    def share(self) -> None:
        now, seen, sharing, left = self._clock(), self._seen, [], self._cores
        self._seen = {}
        for channel in self._channels():
            answered, last = seen.get(channel, (0, now - 2 * IDLE))
            if channel.batches or channel.answered != answered:
                last = now
            self._seen[channel] = channel.answered, last
            if now - last > IDLE:
                continue
            if channel.shares_cores:
                sharing.append(channel)
            else:
                left -= channel.threads
        for channel in sharing:
            channel.set_threads(max(1, left // len(sharing)))


def _check_step(config: ModelConfig) -> None:
    """Ranks meet in their collectives, so each runs the same batches in the same order.

    Raises BadRequest where that cannot be.
    """
    for asked, key in (
        (config.continuous_batching, "continuousBatching"),
        (config.async_communication, "asyncCommunication"),
    ):
        if asked:
            raise BadRequest(
                f"model-config.yaml asks for {key} and for a torchrun group whose ranks all get the"
                " requests: they would get out of sync. Leave one of them out, or use"
                " parallelType: pp, where rank 0 alone gets them."
            )


def _ranks(asked: int | str | None, level: int | None, gpus: int) -> int:
    """torchrun's own words for nproc-per-node are a number, cpu, gpu and auto."""
    if asked is None:
        return level or 1
    if isinstance(asked, int):
        return asked
    word = asked.strip().lower()
    if word.isdecimal() and int(word):
        return int(word)
    if word == "cpu" or (word == "auto" and not gpus):
        return cpu_count()
    if word in ("gpu", "auto") and gpus:
        return gpus
    why = "this server has no GPU" if word == "gpu" else "it must be a number, cpu, gpu or auto"
    raise BadRequest(f"nproc-per-node under torchrun in model-config.yaml is {asked!r}: {why}.")
