"""A temporary directory with the layout of an unpacked archive, made from a plan of packing.

Code files are copied; all other files are symbolic links.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tsx_archiver.linking import link_members
from tsx_archiver.packing import PackingPlan
from tsx_archiver.storage.private_directory import scratch_directory


@contextmanager
def as_directory(plan: PackingPlan, *, copy: bool = False) -> Iterator[Path]:
    """Make the directory for the duration of the context; with `copy`, all files are copied."""
    with scratch_directory("tsx-model-") as path:
        directory = path.resolve()
        link_members(plan, directory, copy=copy)
        yield directory
