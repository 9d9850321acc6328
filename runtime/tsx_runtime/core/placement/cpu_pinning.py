"""Pins CPU workers to cores, as `cpu_launcher_enable` and `cpu_launcher_args` ask.

TorchServe starts each worker through `python -m torch.backends.xeon.run_cpu ARGS --ninstances N
--rank I`, which needs numactl or taskset. tsx reads the same options, but each worker sets its own
affinity. The kernel then allocates the worker's memory on the NUMA node of its cores (first touch).
No launcher program runs between the server and its workers.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

CPU_DIRECTORY = Path("/sys/devices/system/cpu")
NODE_DIRECTORY = Path("/sys/devices/system/node")
LATENCY_MODE_CORES = 4  # cores of an instance in --latency-mode


class Cpu(NamedTuple):
    """A logical core, with the system's numbers."""

    number: int
    core: int  # the physical core, numbered within its package
    package: int
    node: int  # the NUMA node


class Pinning(NamedTuple):
    """The parsed `cpu_launcher_args`."""

    cores_per_instance: int | None = None
    instances: int | None = None  # None: the number of workers
    node: int | None = None
    core_list: tuple[int, ...] = ()
    use_logical_cores: bool = False  # whether hyperthreads are used too
    skip_cross_node: bool = False
    one_per_node: bool = False  # whether an instance has a whole node
    is_disabled: bool = False  # whether workers are not pinned
    ignored_options: tuple[str, ...] = ()  # known options without an effect here


# Options that preload libraries or only concern the launcher; the value tells whether an option
# has an argument. The server's own LD_PRELOAD can preload libraries.
_IGNORED_OPTIONS = {
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
    """Parse the options of torch.backends.xeon.run_cpu, with '-' or '_' in their names.

    Raises:
        ValueError: An option is unknown, or its value is invalid.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("ncores-per-instance", "ninstances", "node-id"):
        parser.add_argument(*_option_names(name), type=int)
    parser.add_argument(*_option_names("core-list"), default="")
    for name in (
        "use-logical-core",
        "skip-cross-node-cores",
        "latency-mode",
        "throughput-mode",
        "disable-numactl",
        "disable-taskset",
    ):
        parser.add_argument(*_option_names(name), action="store_true")
    for name, takes_value in _IGNORED_OPTIONS.items():
        parser.add_argument(*_option_names(name), action="store" if takes_value else "store_true")
    options = parser.parse_args(shlex.split(text))
    for name in ("ncores_per_instance", "ninstances"):
        value = getattr(options, name)
        if value is not None and value < 1 and value != -1:  # In run_cpu, -1 is the default.
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    if options.latency_mode and options.throughput_mode:
        raise ValueError("--latency-mode and --throughput-mode cannot be combined")
    return Pinning(
        cores_per_instance=(
            LATENCY_MODE_CORES if options.latency_mode else _or_none(options.ncores_per_instance)
        ),
        instances=_or_none(options.ninstances),
        node=_or_none(options.node_id),
        core_list=parse_cores(options.core_list),
        use_logical_cores=options.use_logical_core,
        skip_cross_node=options.skip_cross_node_cores,
        one_per_node=options.throughput_mode,
        is_disabled=options.disable_numactl and options.disable_taskset,
        ignored_options=tuple(
            f"--{name}" for name in _IGNORED_OPTIONS if getattr(options, name.replace("-", "_"))
        ),
    )


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a list of cores in Linux's form, such as `0,1,4-7`.

    Raises:
        ValueError: An entry is neither a number nor a range.
    """
    numbers: list[int] = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"'{part}' is neither a core nor a range of cores such as 0-3")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(numbers))


def check_pinning(pinning: Pinning, cpus: Sequence[Cpu]) -> None:
    """Check that this process may use the cores and the NUMA node that the options name.

    Raises:
        ValueError: One of them is not available.
    """
    available = {cpu.number for cpu in cpus}
    if missing := [number for number in pinning.core_list if number not in available]:
        raise ValueError(
            f"core {missing[0]} is not available to this process, which may use"
            f" {_number_list(available)}"
        )
    nodes = {cpu.node for cpu in cpus}
    if pinning.node is not None and pinning.node not in nodes:
        raise ValueError(
            f"there is no NUMA node {pinning.node}; this process may use node {_number_list(nodes)}"
        )


def choose_cores(
    pinning: Pinning, cpus: Sequence[Cpu], instance: int, workers: int
) -> tuple[int, ...]:
    """Return the cores of worker number `instance` of `workers`; an unpinned worker has none.

    Instances get the cores in the order of nodes, packages and core numbers. If the cores do not
    suffice, further workers start over and share cores.
    """
    usable = _usable_cores(pinning, cpus)
    if pinning.is_disabled or not usable:
        return ()
    if pinning.one_per_node:
        slices = _group_by_node(usable)
    else:
        size = pinning.cores_per_instance or max(
            1, len(usable) // max(1, pinning.instances or workers)
        )
        slices = _slice_cores(usable, size, whole_nodes=pinning.skip_cross_node)
        if pinning.instances:
            slices = slices[: pinning.instances]
    return tuple(cpu.number for cpu in slices[instance % len(slices)])


def read_cpus() -> list[Cpu]:
    """Return the cores that this process may use, or none if the system does not report them."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    node_of = {}
    for directory in NODE_DIRECTORY.glob("node[0-9]*"):
        for number in parse_cores((directory / "cpulist").read_text()):
            node_of[number] = int(directory.name[4:])
    cpus = []
    for number in sorted(os.sched_getaffinity(0)):
        topology = CPU_DIRECTORY / f"cpu{number}" / "topology"
        core, package = (
            _number(topology / name, default)
            for name, default in (("core_id", number), ("physical_package_id", 0))
        )
        cpus.append(Cpu(number, core, package, node_of.get(number, 0)))
    return cpus


def _usable_cores(pinning: Pinning, cpus: Sequence[Cpu]) -> list[Cpu]:
    """Return the cores in the order in which instances get them.

    By default these are one logical core of each physical core.
    """
    if pinning.core_list:
        by_number = {cpu.number: cpu for cpu in cpus}
        return [by_number[number] for number in pinning.core_list if number in by_number]
    node_cores = [cpu for cpu in cpus if pinning.node is None or cpu.node == pinning.node]
    first_logical_cores: dict[tuple[int, int, int], Cpu] = {}
    for cpu in sorted(node_cores):
        first_logical_cores.setdefault((cpu.node, cpu.package, cpu.core), cpu)
    selected: Collection[Cpu] = (
        node_cores if pinning.use_logical_cores else first_logical_cores.values()
    )
    return sorted(selected, key=lambda cpu: (cpu.node, cpu.package, cpu.core, cpu.number))


def _slice_cores(cpus: list[Cpu], size: int, *, whole_nodes: bool) -> list[list[Cpu]]:
    """Cut the cores into slices of `size`, or into one slice if there are fewer cores.

    With `whole_nodes`, no slice spans two nodes.
    """
    groups = _group_by_node(cpus) if whole_nodes else [cpus]
    slices = [
        group[start : start + size]
        for group in groups
        for start in range(0, len(group) - size + 1, size)
    ]
    return slices or [cpus]


def _group_by_node(cpus: Iterable[Cpu]) -> list[list[Cpu]]:
    nodes: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        nodes.setdefault(cpu.node, []).append(cpu)
    return list(nodes.values())


def _number_list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _option_names(name: str) -> list[str]:
    return [f"--{name}", f"--{name.replace('-', '_')}"]


def _or_none(value: int | None) -> int | None:
    return None if value is None or value == -1 else value


def _number(file: Path, default: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return default
