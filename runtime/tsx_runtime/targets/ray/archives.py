"""The transfer of archives to nodes, which check their SHA-256.

Archives come from a path that all nodes share, from S3, or from the cluster's object store.
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

HOLDER_NAME = "tsx-archives"  # name of the actor in the namespace `tsx`
PIECE_BYTES = 8 << 20  # size of one object in the object store
HEAD_RESOURCES = {
    "node:__internal_head__": 0.001
}  # The actor runs on the head node, because the cluster ends with that node anyway.


class ArchiveHolder:
    """A detached actor that owns the pieces of archives, so that they outlive their uploader."""

    def __init__(self) -> None:
        self._incomplete: dict[str, dict[int, Any]] = {}
        self._complete: dict[str, list[Any]] = {}

    def add(self, digest: str, number: int, piece: bytes) -> None:
        """Store a piece of an archive; concurrent uploads of one archive have the same pieces."""
        self._incomplete.setdefault(digest, {})[number] = ray.put(piece)

    def finish(self, digest: str, count: int) -> None:
        """Complete an upload; its SHA-256 is not checked here, but on the nodes.

        Raises:
            ValueError: Pieces are missing.
        """
        uploaded_pieces = self._incomplete.pop(digest, {})
        if digest in self._complete:
            return
        # A cancelled upload of the same archive may have removed pieces.
        if len(uploaded_pieces) < count:
            raise ValueError(
                f"{count - len(uploaded_pieces)} of {count} pieces of the archive {digest} are"
                " gone. Deploy it again."
            )
        self._complete[digest] = [uploaded_pieces[number] for number in range(count)]

    def pieces(self, digest: str) -> list[Any]:
        """Return references to the pieces of an archive, or an empty list if it is unknown."""
        return self._complete.get(digest, [])

    def cancel(self, digest: str) -> None:
        """Drop an incomplete upload; a complete archive stays, because deployments may need it."""
        self._incomplete.pop(digest, None)

    def remove(self, digest: str) -> None:
        self._complete.pop(digest, None)
        self._incomplete.pop(digest, None)


def has_archive(digest: str) -> bool:
    """Tell whether the cluster's object store has the archive with this SHA-256."""
    try:
        actor = ray.get_actor(HOLDER_NAME, namespace=NAMESPACE)
    except ValueError:
        return False
    return bool(ray.get(actor.pieces.remote(digest)))


def get_holder() -> Any:
    """Return the cluster's `ArchiveHolder`; start it if there is none."""
    kind = ray.remote(ArchiveHolder)
    return kind.options(
        name=HOLDER_NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=HEAD_RESOURCES,
        max_restarts=-1,
    ).remote()


def upload(path: Path) -> str:
    """Upload an archive to the cluster's object store if necessary; return its SHA-256."""
    with open_source(path) as file:
        digest = content_digest(file)
        if has_archive(digest):
            return digest
        file.seek(0)
        actor, count = get_holder(), 0
        try:
            while piece := file.read(PIECE_BYTES):
                ray.get(actor.add.remote(digest, count, piece))
                count += 1
            ray.get(actor.finish.remote(digest, count))
        except (
            BaseException
        ):  # even after Ctrl-C, because the pieces would stay in the head node's memory
            actor.cancel.remote(digest)
            raise
    return digest


def open_model(model: RayModel, settings: Settings) -> OpenArchive:
    """Open an archive, which each node unpacks only once; this blocks.

    Raises:
        ArchiveError: The archive cannot be opened.
        DownloadFailed: The archive cannot be fetched.
        InvalidModel: The archive has changed since it was deployed.
    """
    if model.source.startswith((OBJECT, S3)):
        assert model.digest is not None  # `RayModel` has checked this.
        downloads = Cache(settings.cache_dir or default_cache(), kind="downloads")
        entry = downloads.open(model.digest, partial(_fetch, model, settings))
        try:
            return _open_checked(next(entry.files.iterdir()), model, settings)
        finally:
            entry.lock.close()
    return _open_checked(Path(model.source), model, settings)


def _open_checked(path: Path, model: RayModel, settings: Settings) -> OpenArchive:
    archive = open_archive(
        path, cache=settings.archive_cache(), limits=settings.archive_limits(), name=model.name
    )
    if model.digest not in (None, archive.digest):
        archive.close()
        state = (
            f"has the sha-256 {archive.digest}"
            if archive.digest
            else "is a directory, which has no sha-256"
        )
        raise InvalidModel(
            f"{model.source} {state}, not {model.digest}: it changed since it was deployed. Deploy"
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
        actor = ray.get_actor(HOLDER_NAME, namespace=NAMESPACE)
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


def _write(pieces: Iterator[bytes], file: Path, expected_digest: str) -> None:
    digest = hashlib.sha256()
    with open(file, "xb", opener=private_opener) as content:
        for piece in pieces:
            digest.update(piece)
            content.write(piece)
    if digest.hexdigest() != expected_digest:
        raise DownloadFailed(
            f"the sha-256 of what the object store holds is {digest.hexdigest()}, not"
            f" {expected_digest}. Deploy it again."
        )
