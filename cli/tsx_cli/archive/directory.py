"""A directory like an unpacked archive, made before anything is packed.

Code is copied, and all other files are linked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tsx_archiver.linking import link_members
from tsx_archiver.packing import PackingPlan
from tsx_archiver.storage.private_directory import temporary_directory


@contextmanager
def as_directory(plan: PackingPlan, *, copy: bool = False) -> Iterator[Path]:
    """Make the directory for the duration of the context; with `copy`, it has no links."""
    with TemporaryDirectory(prefix="tsx-model-", dir=temporary_directory()) as path:
        directory = Path(path).resolve()
        link_members(plan, directory, copy=copy)
        yield directory
