"""Pins the server and the load generator to cores of their own, so that neither takes time from the
other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tsx_cli.bench.model.parts import PinnedCores
from tsx_cli.common.failure import UsageError
from tsx_runtime.core.placement.cpu_pinning import parse_cores

SERVER, GENERATOR = "--server-cores", "--generator-cores"


def chosen(
    server: str | None, generator: str | None, *, running: bool = False
) -> PinnedCores | None:
    """Both sides' cores; the side that names none gets what the other leaves, unless the server is
    `running` already. Raises UsageError.
    """
    sides = {
        option: _cores(text, option)
        for option, text in ((SERVER, server), (GENERATOR, generator))
        if text is not None
    }
    if not sides:
        return None
    both = set(sides.get(SERVER, ())) & set(sides.get(GENERATOR, ()))
    if both:
        raise UsageError(
            f"{SERVER} and {GENERATOR} both have core {min(both)}; give each side cores of its own"
        )
    if running:
        return PinnedCores(server=[], generator=sides[GENERATOR])
    for option in (SERVER, GENERATOR):
        if option not in sides:
            (other,) = sides
            sides[option] = sorted(os.sched_getaffinity(0) - set(sides[other]))
            if not sides[option]:
                raise UsageError(
                    f"{other}: {server or generator} are all cores, and none is left for the other"
                    " side; give fewer"
                )
    return PinnedCores(server=sides[SERVER], generator=sides[GENERATOR])


def _cores(text: str, option: str) -> list[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(
            f"{option}: this system does not let a process choose its cores, as Linux does; leave"
            " it out"
        )
    try:
        cores = sorted(parse_cores(text))
    except ValueError as error:
        raise UsageError(f"{option}: {error}; write cores such as 0-3 or 0,2") from error
    have = os.sched_getaffinity(0)
    missing = [core for core in cores if core not in have]
    if missing or not cores:
        wrong = f"core {missing[0]} is not one of those" if missing else "it names no core of those"
        raise UsageError(
            f"{option}: {wrong} that this process may use: {', '.join(map(str, sorted(have)))}"
        )
    return cores


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and the processes that it starts meanwhile, on these cores; anywhere where there
    are none.

    A server counts the cores that it may use, so that its workers and threads follow.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
