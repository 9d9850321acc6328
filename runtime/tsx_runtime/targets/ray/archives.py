"""Brings an archive to a node: from a path that nodes share, from S3, or from the cluster's object
store, and checks its sha-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from tsx_archiver import OpenArchive, open_archive
from tsx_archiver.opening import open_source
from tsx_archiver.storage.cache import Cache, default_cache
from tsx_archiver.storage.digest import content_digest
from tsx_archiver.storage.private_directory import private_opener
from tsx_runtime.errors import DownloadFailed, InvalidModel
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Fetcher, Trust
from tsx_runtime.targets.ray.config import NAMESPACE, OBJECT, S3, RayModel

HOLDER = "tsx-archives"  # the actor's name, in the namespace `tsx`
PIECE = 8 << 20  # bytes of an archive that are one object
ON_HEAD = {"node:__internal_head__": 0.001}  # which has no successor either


class ArchiveHolder:
    """A detached actor that owns the pieces of archives, so that they outlive the deployer that
    uploaded them.
    """

    def __init__(self) -> None:
        self._arriving: dict[str, dict[int, Any]] = {}
        self._complete: dict[str, list[Any]] = {}

    def add(self, digest: str, number: int, piece: bytes) -> None:
        """Two that upload the same archive at the same time send the same pieces."""
        self._arriving.setdefault(digest, {})[number] = ray.put(piece)

    def finish(self, digest: str, count: int) -> None:
        """Raises ValueError. The nodes check the sha-256."""
        arrived = self._arriving.pop(digest, {})
        if digest in self._complete:
            return
        if len(arrived) < count:  # another upload of it was given up meanwhile
            raise ValueError(
                f"{count - len(arrived)} of {count} pieces of the archive {digest} are gone. Deploy"
                " it again."
            )
        self._complete[digest] = [arrived[number] for number in range(count)]

    def pieces(self, digest: str) -> list[Any]:
        """Object references, or none where the archive is not there."""
        return self._complete.get(digest, [])

    def cancel(self, digest: str) -> None:
        """An upload was given up. An archive that is complete stays: deployments may use it."""
        self._arriving.pop(digest, None)

    def remove(self, digest: str) -> None:
        self._complete.pop(digest, None)
        self._arriving.pop(digest, None)


def has_archive(digest: str) -> bool:
    """Whether the cluster's object store has this archive."""
    try:
        actor = ray.get_actor(HOLDER, namespace=NAMESPACE)
    except ValueError:
        return False
    return bool(ray.get(actor.pieces.remote(digest)))


def holder() -> Any:
    """The cluster's own, started where there is none. Needs a connection to the cluster."""
    kind = ray.remote(ArchiveHolder)
    return kind.options(
        name=HOLDER,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=ON_HEAD,
        max_restarts=-1,
    ).remote()


def upload(path: Path) -> str:
    """Put an archive into the cluster's object store, unless it is there. Returns its sha-256."""
    with open_source(path) as file:
        digest = content_digest(file)
        if has_archive(digest):
            return digest
        file.seek(0)
        actor, count = holder(), 0
        try:
            while piece := file.read(PIECE):
                ray.get(actor.add.remote(digest, count, piece))
                count += 1
            ray.get(actor.finish.remote(digest, count))
        except BaseException:  # Ctrl-C as well: its pieces take the memory of the head node
            actor.cancel.remote(digest)
            raise
    return digest


def open_model(model: RayModel, settings: Settings) -> OpenArchive:
    """Blocking. Unpacked once a node, whatever number of replicas it has.

    Raises ArchiveError, DownloadFailed, InvalidModel.
    """
    if model.source.startswith((OBJECT, S3)):
        assert model.digest is not None  # `RayModel` sees to it
        downloads = Cache(settings.cache_dir or default_cache(), kind="downloads")
        entry = downloads.open(model.digest, partial(_fetch, model, settings))
        try:
            return _opened(next(entry.files.iterdir()), model, settings)
        finally:
            entry.lock.close()
    return _opened(Path(model.source), model, settings)


def _opened(path: Path, model: RayModel, settings: Settings) -> OpenArchive:
    archive = open_archive(
        path, cache=settings.archive_cache(), limits=settings.archive_limits(), name=model.name
    )
    if model.digest not in (None, archive.digest):
        archive.close()
        found = (
            f"has the sha-256 {archive.digest}"
            if archive.digest
            else "is a directory, which has no sha-256"
        )
        raise InvalidModel(
            f"{model.source} {found}, not {model.digest}: it changed since it was deployed. Deploy"
            " it again."
        )
    return archive


def _fetch(model: RayModel, settings: Settings, directory: Path) -> dict[str, int]:
    if model.source.startswith(S3):
        url = f"{model.source}#sha256={model.digest}"
        file = Fetcher(settings, store=directory).fetch(url, Trust.OPERATOR)
    else:
        file = directory / f"{model.name}.mar"
        _write(_pieces(str(model.digest)), file, str(model.digest))
    return {file.name: file.stat().st_size}


def _pieces(digest: str) -> Iterator[bytes]:
    try:
        actor = ray.get_actor(HOLDER, namespace=NAMESPACE)
        references = ray.get(actor.pieces.remote(digest))
        if not references:
            raise ValueError(
                "no archive of this sha-256 was uploaded, or the actor that held it was restarted"
            )
        for reference in references:
            yield ray.get(reference)
    except (RayError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DownloadFailed(
            f"the object store has no archive {digest}: {reason}. Deploy it again, or put it where"
            " nodes share it."
        ) from error


def _write(pieces: Iterator[bytes], file: Path, wanted: str) -> None:
    digest = hashlib.sha256()
    with open(file, "xb", opener=private_opener) as content:
        for piece in pieces:
            digest.update(piece)
            content.write(piece)
    if digest.hexdigest() != wanted:
        raise DownloadFailed(
            f"the sha-256 of what the object store holds is {digest.hexdigest()}, not {wanted}."
            " Deploy it again."
        )
