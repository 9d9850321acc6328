"""A directory like an unpacked archive, with links to a model's files and copies of its code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from tsx_archiver.names import MANIFEST_PATH
from tsx_archiver.opening import OpenArchive, open_archive
from tsx_archiver.packing import PackingPlan
from tsx_archiver.storage.cache import Cache, as_cache


def link_members(
    plan: PackingPlan, directory: Path, *, hard: bool = False, copy: bool = False
) -> dict[str, int]:
    """Fill a directory, and return the sizes of the files that are not symbolic links.

    Args:
        plan: The members.
        directory: The directory.
        hard: Whether to use hard links if the file system has them.
        copy: Whether to copy all files.
    """
    sizes = {}
    for member in plan.members:
        target = directory / member.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(member.source, bytes):
            target.write_bytes(member.source)
        elif (
            copy
            or ".py" in (target.suffix, member.source.suffix)
            or member.name == plan.manifest["model"].get("configFile")
        ):
            # Opening refuses links to code and configuration, so these files are copied.
            shutil.copyfile(member.source, target)
        elif not hard or not _try_hard_link(member.source, target):
            target.symlink_to(member.source.absolute())
            continue
        sizes[member.name] = member.size
    manifest = directory / MANIFEST_PATH
    manifest.parent.mkdir(exist_ok=True)
    manifest.write_text(json.dumps(plan.manifest))
    return sizes


def open_linked(plan: PackingPlan, source: str, cache: Path | Cache | None) -> OpenArchive:
    """Open a model as an entry of the cache that links to its files.

    Files on the cache's file system get hard links: they exist until the entry is removed, and
    isolated workers can read them. Neither holds for files on another file system, which get
    symbolic links.

    Args:
        plan: The members.
        source: A text that identifies the files, which must never change.
        cache: The cache.

    Raises:
        ArchiveError: The model cannot be opened.
    """
    archive_cache = as_cache(cache)
    digest = hashlib.sha256(
        json.dumps([source, plan.manifest, sorted(member.name for member in plan.members)]).encode()
    ).hexdigest()
    entry = archive_cache.open(digest, lambda target: link_members(plan, target, hard=True))
    try:
        archive = open_archive(entry.files)
    except BaseException:
        entry.lock.close()
        raise
    archive._lock = entry.lock
    return archive


def _try_hard_link(source: Path, target: Path) -> bool:
    try:
        os.link(source.resolve(), target)
    except OSError:  # The target is on another file system, or on one without hard links.
        return False
    return True
