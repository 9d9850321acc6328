"""A temporary directory with the layout of an unpacked archive, made from a plan of packing.

Code files are copied; all other files are symbolic links.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tsx_archiver.linking import link_members
from tsx_archiver.packing import ArchiveSpec, PackingPlan, plan_archive
from tsx_archiver.storage.private_directory import scratch_directory


@contextmanager
def as_directory(plan: PackingPlan, *, copy: bool = False) -> Iterator[Path]:
    """Make the directory for the duration of the context; with `copy`, all files are copied."""
    with scratch_directory("tsx-model-") as path:
        directory = path.resolve()
        link_members(plan, directory, copy=copy)
        yield directory


@contextmanager
def directory_of(spec: ArchiveSpec) -> Iterator[tuple[Path, list[Path]]]:
    """Make the directory of a model, and also yield the files that it is made of."""
    plan = plan_archive(spec)
    files = [member.source for member in plan.members if isinstance(member.source, Path)]
    with as_directory(plan) as directory:
        yield directory, files
