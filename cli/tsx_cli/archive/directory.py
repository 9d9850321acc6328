"""What an archive is to hold, as a directory like an unpacked one, before anything is packed: code
copied, all else linked.
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
    """Make the directory for as long as the context lasts; `copy`: it has no links."""
    with TemporaryDirectory(prefix="tsx-model-", dir=temporary_directory()) as made:
        directory = Path(made).resolve()
        link_members(plan, directory, copy=copy)
        yield directory
