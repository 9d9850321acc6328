"""What an archive is to hold, as a directory like an unpacked one, before anything is packed: code copied, all else linked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tsx_archiver.names import MANIFEST_PATH
from tsx_archiver.packing import PackingPlan
from tsx_archiver.storage.private_directory import temporary_place


@contextmanager
def as_directory(plan: PackingPlan) -> Iterator[Path]:
    """As long as the context lasts."""
    with TemporaryDirectory(prefix="tsx-model-", dir=temporary_place()) as made:
        directory = Path(made).resolve()
        for member in plan.members:
            target = directory / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(member.source, bytes):
                target.write_bytes(member.source)
            elif target.suffix == ".py" or member.source.suffix == ".py":  # a worker runs no code that a link leads to
                shutil.copyfile(member.source, target)
            else:
                target.symlink_to(member.source.absolute())
        manifest = directory / MANIFEST_PATH
        manifest.parent.mkdir(exist_ok=True)
        manifest.write_text(json.dumps(plan.manifest))
        yield directory
