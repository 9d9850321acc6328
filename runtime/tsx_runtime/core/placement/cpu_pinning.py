"""Pins CPU workers to cores: `cpu_launcher_enable` and `cpu_launcher_args`, without the launcher.
Contract section 6.12.

TorchServe starts each worker through `python -m torch.backends.xeon.run_cpu ARGS --ninstances N
--rank I`, which needs numactl or taskset. The same options decide here, and the worker sets its own
affinity: memory is then taken from the node of its cores by the kernel's own rule (first touch),
and a change in the number of workers needs no program in between.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

CPUS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
LATENCY_CORES = 4  # of an instance in --latency-mode


class Cpu(NamedTuple):
    """A logical core, as the system numbers it."""

    number: int
    core: int  # the physical core; numbers are those of its package
    package: int
    node: int  # NUMA


class Pinning(NamedTuple):
    """The parsed `cpu_launcher_args`."""

    cores_per_instance: int | None = None
    instances: int | None = None  # None: as many as the model has workers
    node: int | None = None
    core_list: tuple[int, ...] = ()
    logical: bool = False  # use hyperthreads as well
    skip_cross_node: bool = False
    by_node: bool = False  # an instance has a node to itself
    off: bool = False  # nothing is bound
    ignored: tuple[str, ...] = ()  # options that are known, and do nothing here


# what concerns libraries that have to be loaded before the interpreter: the server's own LD_PRELOAD
# does it
_INERT = {
    "enable-tcmalloc": False,
    "enable-jemalloc": False,
    "use-default-allocator": False,
    "disable-iomp": False,
    "multi-instance": False,
    "log-path": True,
    "log-file-prefix": True,
    "rank": True,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_pinning(text: str) -> Pinning:
    """The options of torch.backends.xeon.run_cpu, with '-' or '_' in their names.

    Raises ValueError.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("ncores-per-instance", "ninstances", "node-id"):
        parser.add_argument(*_spellings(name), type=int)
    parser.add_argument(*_spellings("core-list"), default="")
    for name in (
        "use-logical-core",
        "skip-cross-node-cores",
        "latency-mode",
        "throughput-mode",
        "disable-numactl",
        "disable-taskset",
    ):
        parser.add_argument(*_spellings(name), action="store_true")
    for name, takes_value in _INERT.items():
        parser.add_argument(*_spellings(name), action="store" if takes_value else "store_true")
    given = parser.parse_args(shlex.split(text))
    for name in ("ncores_per_instance", "ninstances"):
        value = getattr(given, name)
        if value is not None and value < 1 and value != -1:  # run_cpu's word for "not given"
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    if given.latency_mode and given.throughput_mode:
        raise ValueError("--latency-mode and --throughput-mode cannot be combined")
    return Pinning(
        cores_per_instance=(
            LATENCY_CORES if given.latency_mode else _or_none(given.ncores_per_instance)
        ),
        instances=_or_none(given.ninstances),
        node=_or_none(given.node_id),
        core_list=parse_cores(given.core_list),
        logical=given.use_logical_core,
        skip_cross_node=given.skip_cross_node_cores,
        by_node=given.throughput_mode,
        off=given.disable_numactl and given.disable_taskset,
        ignored=tuple(f"--{name}" for name in _INERT if getattr(given, name.replace("-", "_"))),
    )


def parse_cores(text: str) -> tuple[int, ...]:
    """`0,1,4-7`, as Linux writes lists of cores. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"'{part}' is neither a core nor a range of cores such as 0-3")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(numbers))


def check_pinning(pinning: Pinning, cpus: Sequence[Cpu]) -> None:
    """Raises ValueError for cores that this machine, or this process, does not have."""
    have = {cpu.number for cpu in cpus}
    if missing := [number for number in pinning.core_list if number not in have]:
        raise ValueError(
            f"core {missing[0]} is not available to this process, which may use {_spans(have)}"
        )
    nodes = {cpu.node for cpu in cpus}
    if pinning.node is not None and pinning.node not in nodes:
        raise ValueError(
            f"there is no NUMA node {pinning.node}; this process may use node {_spans(nodes)}"
        )


def choose_cores(
    pinning: Pinning, cpus: Sequence[Cpu], instance: int, workers: int
) -> tuple[int, ...]:
    """The cores of one worker of so many; empty where it is not pinned.

    Instances lie side by side in the order of nodes, packages and cores. Where there are more
    workers than room, they start over, and share.
    """
    usable = _usable(pinning, cpus)
    if pinning.off or not usable:
        return ()
    if pinning.by_node:
        places = _by_node(usable)
    else:
        size = pinning.cores_per_instance or max(
            1, len(usable) // max(1, pinning.instances or workers)
        )
        places = _cut(usable, size, whole_nodes=pinning.skip_cross_node)
        if pinning.instances:
            places = places[: pinning.instances]
    return tuple(cpu.number for cpu in places[instance % len(places)])


def read_cpus() -> list[Cpu]:
    """The cores that this process may use. Empty where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    node_of = {}
    for directory in NODES.glob("node[0-9]*"):
        for number in parse_cores((directory / "cpulist").read_text()):
            node_of[number] = int(directory.name[4:])
    cpus = []
    for number in sorted(os.sched_getaffinity(0)):
        topology = CPUS / f"cpu{number}" / "topology"
        core, package = (
            _number(topology / name, otherwise)
            for name, otherwise in (("core_id", number), ("physical_package_id", 0))
        )
        cpus.append(Cpu(number, core, package, node_of.get(number, 0)))
    return cpus


def _usable(pinning: Pinning, cpus: Sequence[Cpu]) -> list[Cpu]:
    """In the order in which instances take them: one of each physical core, unless hyperthreads or
    cores by number are asked for.
    """
    if pinning.core_list:
        by_number = {cpu.number: cpu for cpu in cpus}
        return [by_number[number] for number in pinning.core_list if number in by_number]
    chosen = [cpu for cpu in cpus if pinning.node is None or cpu.node == pinning.node]
    firsts: dict[tuple[int, int, int], Cpu] = {}
    for cpu in sorted(chosen):
        firsts.setdefault((cpu.node, cpu.package, cpu.core), cpu)
    wanted: Collection[Cpu] = chosen if pinning.logical else firsts.values()
    return sorted(wanted, key=lambda cpu: (cpu.node, cpu.package, cpu.core, cpu.number))


def _cut(cpus: list[Cpu], size: int, *, whole_nodes: bool) -> list[list[Cpu]]:
    """Runs of `size`; at least one, however few there are.

    `whole_nodes`: what a node has left over is left out.
    """
    runs = _by_node(cpus) if whole_nodes else [cpus]
    places = [
        run[start : start + size] for run in runs for start in range(0, len(run) - size + 1, size)
    ]
    return places or [cpus]


def _by_node(cpus: Iterable[Cpu]) -> list[list[Cpu]]:
    nodes: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        nodes.setdefault(cpu.node, []).append(cpu)
    return list(nodes.values())


def _spans(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _spellings(name: str) -> list[str]:
    return [f"--{name}", f"--{name.replace('-', '_')}"]


def _or_none(value: int | None) -> int | None:
    return None if value is None or value == -1 else value


def _number(file: Path, otherwise: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return otherwise
