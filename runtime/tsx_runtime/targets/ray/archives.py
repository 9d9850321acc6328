"""Brings an archive to a node: from a path that nodes share, from S3, or from the cluster's object store, and checks its sha-256."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
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
    """A detached actor that owns the pieces of archives, so that they outlive the deployer that uploaded them."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Any]] = {}
        self._complete: set[str] = set()

    def has(self, digest: str) -> bool:
        return digest in self._complete

    def begin(self, digest: str) -> None:
        self._pieces[digest] = []

    def add(self, digest: str, piece: bytes) -> None:
        self._pieces[digest].append(ray.put(piece))

    def finish(self, digest: str) -> None:
        """Raises ValueError where the pieces are not the archive's."""
        check = hashlib.sha256()
        for piece in self._pieces[digest]:
            check.update(ray.get(piece))
        if check.hexdigest() != digest:
            del self._pieces[digest]
            raise ValueError(f"the sha-256 of what was uploaded is {check.hexdigest()}, not {digest}")
        self._complete.add(digest)

    def pieces(self, digest: str) -> list[Any]:
        """Object references, or none where the archive is not there."""
        return self._pieces[digest] if digest in self._complete else []

    def remove(self, digest: str) -> None:
        self._complete.discard(digest)
        self._pieces.pop(digest, None)


def holder() -> Any:
    """The cluster's own, started where there is none. Needs a connection to the cluster."""
    kind = ray.remote(ArchiveHolder)
    return kind.options(
        name=HOLDER, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0, resources=ON_HEAD, max_restarts=-1
    ).remote()


def upload(path: Path, sent: Callable[[int], None] = lambda size: None) -> str:
    """Put an archive into the cluster's object store, unless it is there. Returns its sha-256; `sent` gets the bytes of each piece."""
    with open_source(path) as file:
        digest = content_digest(file)
        actor = holder()
        if ray.get(actor.has.remote(digest)):
            return digest
        file.seek(0)
        ray.get(actor.begin.remote(digest))
        while piece := file.read(PIECE):
            ray.get(actor.add.remote(digest, piece))
            sent(len(piece))
        ray.get(actor.finish.remote(digest))
    return digest


def open_model(model: RayModel, settings: Settings) -> OpenArchive:
    """Blocking. Unpacked once a node, whatever number of replicas it has. Raises ArchiveError, DownloadFailed, InvalidModel."""
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
    archive = open_archive(path, cache=settings.cache_dir, limits=settings.archive_limits(), name=model.name)
    if model.digest not in (None, archive.digest):
        archive.close()
        found = f"has the sha-256 {archive.digest}" if archive.digest else "is a directory, which has no sha-256"
        raise InvalidModel(f"{model.source} {found}, not {model.digest}: it changed since it was deployed. Deploy it again.")
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
            raise ValueError("no archive of this sha-256 was uploaded, or the actor that held it was restarted")
        for reference in references:
            yield ray.get(reference)
    except (RayError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DownloadFailed(
            f"the object store has no archive {digest}: {reason}. Deploy it again, or put it where nodes share it."
        ) from error


def _write(pieces: Iterator[bytes], file: Path, wanted: str) -> None:
    digest = hashlib.sha256()
    with open(file, "xb", opener=private_opener) as content:
        for piece in pieces:
            digest.update(piece)
            content.write(piece)
    if digest.hexdigest() != wanted:
        raise DownloadFailed(f"the sha-256 of what the object store holds is {digest.hexdigest()}, not {wanted}. Deploy it again.")
