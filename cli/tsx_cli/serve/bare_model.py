"""A model file that is served without being packed: a directory that looks like an unpacked archive."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tsx_archiver import plan_archive
from tsx_archiver.names import MANIFEST_PATH
from tsx_archiver.storage.private_directory import temporary_place
from tsx_cli.archive.model_file import Parts, work_out


@contextmanager
def unpacked(path: Path, parts: Parts, name: str | None = None) -> Iterator[tuple[Path, list[str]]]:
    """The directory, as long as the context lasts, and lines that say what was worked out.

    Code is copied, all else linked. Raises `UsageError` and `ArchiveError`.
    """
    spec, notes = work_out(path, parts, name=name)
    plan = plan_archive(spec)
    with TemporaryDirectory(prefix="tsx-model-", dir=temporary_place()) as made:
        directory = Path(made)
        for member in plan.members:
            target = directory / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(member.source, bytes):
                target.write_bytes(member.source)
            elif member.source.suffix == ".py":  # the server runs no code that a link leads to
                shutil.copyfile(member.source, target)
            else:
                target.symlink_to(member.source.absolute())
        manifest = directory / MANIFEST_PATH
        manifest.parent.mkdir()
        manifest.write_text(json.dumps(plan.manifest))
        yield directory, notes
