"""A model whose files lie elsewhere as a directory like an unpacked archive: code copied, all else
linked.
"""

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
    """Fill `directory`, and return the sizes of the files that are no links.

    `hard`: with hard links where the file system has them. `copy`: with copies, as unpacked.
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
            # A worker runs no code that a link leads to, and a server reads no configuration there.
            shutil.copyfile(member.source, target)
        elif not hard or not _linked(member.source, target):
            target.symlink_to(member.source.absolute())
            continue
        sizes[member.name] = member.size
    manifest = directory / MANIFEST_PATH
    manifest.parent.mkdir(exist_ok=True)
    manifest.write_text(json.dumps(plan.manifest))
    return sizes


def open_linked(plan: PackingPlan, source: str, cache: Path | Cache | None) -> OpenArchive:
    """In the cache, once for all servers that open the same; no byte of it is copied.

    Raises ArchiveError.

    `source` says which files, and that they never change. What a hard link leads to stays until the
    entry goes, and isolated workers can read it; a link to another file system has neither.
    """
    store = as_cache(cache)
    digest = hashlib.sha256(
        json.dumps([source, plan.manifest, sorted(member.name for member in plan.members)]).encode()
    ).hexdigest()
    entry = store.open(digest, lambda target: link_members(plan, target, hard=True))
    try:
        opened = open_archive(entry.files)
    except BaseException:
        entry.lock.close()
        raise
    opened._lock = entry.lock
    return opened


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        return False
    return True
