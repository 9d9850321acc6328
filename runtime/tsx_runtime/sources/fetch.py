"""Fetches an archive from a URL into the model store: checks the URL, downloads, verifies, and then
renames it.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from urllib.parse import unquote

from tsx_archiver import ARCHIVE_SUFFIXES, ArchiveError, is_inside
from tsx_archiver.opening import open_source
from tsx_archiver.storage.copying import copy_file_content
from tsx_archiver.storage.digest import content_digest
from tsx_archiver.storage.private_directory import private_opener
from tsx_runtime.errors import Conflict, DownloadFailed, ModelFileExists, ModelNotFound
from tsx_runtime.plugins import Source
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.sources.urls import (
    AllowList,
    ModelUrl,
    Rules,
    file_name,
    parse_url,
    store_hint,
)

NO_SOURCES: Mapping[str, Source] = {}
SSE_KMS = {"x-amz-server-side-encryption": "aws:kms"}


class Trust(enum.Enum):
    """The source of a URL, which decides what it may name."""

    CLIENT = "a client of the management API: allowed_urls decides"
    OPERATOR = "the command line or the configuration: they may name any URL"


class Fetcher:
    """Blocking, for threads. One transfer at a time for a file; `close` ends those under way."""

    def __init__(
        self,
        settings: Settings,
        store: Path | None = None,
        suffixes: tuple[str, ...] = ARCHIVE_SUFFIXES,
        sources: Mapping[str, Source] = NO_SOURCES,
    ) -> None:
        """Into `store`, by default the model store.

        Raises SettingError for an allow list that cannot be read.
        """
        self._settings = settings
        self._directory = store or settings.model_store
        self._suffixes = suffixes
        self._sources = sources  # plugins, by the schemes of URLs
        self._allowed = AllowList(settings.allowed_urls)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._under_way: set[Path] = set()
        self.served: set[Path] = set()  # archives that the operator named at the start

    def close(self) -> None:
        self._stop.set()

    def local_file(self, text: str, trust: Trust) -> Path | None:
        """Return where a `file:` URL leads that is used in place; None for any other.

        Used in place are files of the store, those that the operator has named, and directories.

        Raises:
            ModelNotFound: The path is neither one of these nor allowed.
            DownloadFailed: Nothing is there, or another file than the URL's digest says.
        """
        url = parse_url(text, self._sources)
        if url.scheme != "file":
            return None
        path, store = Path(unquote(url.path)), self._directory
        inside = store is not None and is_inside(path, store)
        inside = inside or path.resolve() in {served.resolve() for served in self.served}
        if not (inside or trust is Trust.OPERATOR or self._allowed.allows(url)):
            raise ModelNotFound(
                f"Given URL {redacted(text)} does not match any allowed URL(s). {store_hint(store)}"
            )
        if not path.exists():
            raise _failed(url, f"{path} does not exist")
        if not (inside or store is None or trust is Trust.OPERATOR or path.is_dir()):
            return None
        try:
            check_digest(path, url.sha256)
        except (DownloadFailed, OSError) as error:
            raise _failed(url, str(error)) from error
        return path

    def fetch(
        self, text: str, trust: Trust, *, sse_kms: bool = False, beside: Collection[Path] = ()
    ) -> Path:
        """The archive, in the store; where the file that it would be is one of `beside`, under the
        next name that is free.

        Raises ModelNotFound (not allowed), ModelFileExists, Conflict, BadRequest, DownloadFailed.
        """
        url = parse_url(text, self._sources)
        if trust is Trust.CLIENT:
            self._allowed.check(url, text)
        directory = self._directory
        if directory is None:
            raise ModelNotFound(f"The archive at {text} needs a model store. {store_hint(None)}")
        target = directory / file_name(url, self._suffixes)
        with self._lock:
            if target in beside:
                target = next(
                    free
                    for number in itertools.count(2)
                    if not os.path.lexists(free := _numbered(target, number))
                )
            if target in self._under_way:
                raise Conflict(
                    f"{target.name} is already being downloaded by another registration; wait for"
                    " it, or use another file name"
                )
            if os.path.lexists(target):
                raise ModelFileExists(f"Model file already exists {target.name}")
            self._under_way.add(target)
        try:
            self._download(url, target, trust, sse_kms)
        except DownloadFailed as error:
            raise _failed(url, error.message) from error
        finally:
            self._under_way.discard(target)
        return target

    def _download(self, url: ModelUrl, target: Path, trust: Trust, sse_kms: bool) -> None:
        check: Callable[[ModelUrl], None] = (
            self._allowed.check if trust is Trust.CLIENT else lambda url: None
        )
        anywhere = self._settings.allow_private_urls or trust is Trust.OPERATOR
        private: Callable[[ModelUrl], bool] = (
            (lambda url: True) if anywhere else self._allowed.names
        )
        headers = SSE_KMS if sse_kms else {}
        rules = Rules(check, private, self._settings.max_archive_size, headers, self._stop.is_set)
        of_url = hashlib.sha256(url.text.encode()).hexdigest()[:16]
        part = target.with_name(
            f".{target.name}.{of_url}.part"
        )  # one of another URL is none of this one's beginning
        if url.scheme in self._sources:
            ask_plugin(self._sources[url.scheme], url, part, self._settings.max_archive_size)
        elif url.scheme == "file":
            copy_file(Path(unquote(url.path)), part, self._settings.max_archive_size)
        elif url.scheme == "s3":
            from tsx_runtime.sources import s3  # as below: only a download pays for the import

            s3.download(url, part, rules, self._settings.s3_endpoint_url)
        else:
            from tsx_runtime.sources import http_download

            http_download.download(url, part, rules)
        try:
            check_digest(part, url.sha256)
            put(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _failed(url: ModelUrl, why: str) -> DownloadFailed:
    return DownloadFailed(redacted(f"Failed to download archive from: {url.text}: {why}."))


def _numbered(file: Path, number: int) -> Path:
    """m.mar -> m-2.mar"""
    name, dot, suffix = file.name.partition(".")
    return file.with_name(f"{name}-{number}{dot}{suffix}")


def ask_plugin(source: Source, url: ModelUrl, part: Path, most: int) -> None:
    """Raises DownloadFailed, whatever the plugin raises."""
    part.unlink(missing_ok=True)
    try:
        source(url.text, part, most)
        size = part.stat().st_size
    except Exception as error:  # the boundary to the plugin's code
        part.unlink(missing_ok=True)
        raise DownloadFailed(
            f"the plugin for {url.scheme} says: {error or type(error).__name__}"
        ) from error
    if size > most:
        part.unlink()
        raise DownloadFailed(f"it has {size} bytes, and max_archive_size is {most}")


def copy_file(source: Path, part: Path, most: int) -> None:
    """Raises DownloadFailed."""
    part.unlink(missing_ok=True)
    try:
        with open_source(source) as file, open(part, "xb", opener=private_opener) as copy:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise DownloadFailed(f"it has {size} bytes, and max_archive_size is {most}")
            copy_file_content(file, copy, size)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, ArchiveError):
            raise DownloadFailed(error.message.rstrip(".")) from error
        if isinstance(error, OSError):
            raise DownloadFailed(
                f"it cannot be copied to {part.parent} ({error.strerror})"
            ) from error
        raise


def check_digest(file: Path, wanted: str | None) -> None:
    """Raises DownloadFailed."""
    if wanted is None:
        return
    with file.open("rb") as content:
        digest = content_digest(content)
    if digest != wanted:
        raise DownloadFailed(f"its sha-256 is {digest}, not {wanted}")


def put(part: Path, target: Path) -> None:
    """Give the file its name, unless something has it by now."""
    try:
        os.link(part, target)  # unlike a rename, this replaces nothing
    except FileExistsError:
        raise ModelFileExists(f"Model file already exists {target.name}") from None
    except OSError:  # a file system without links
        part.rename(target)
        return
    part.unlink()
