"""Downloads of archives into the model store.

A download checks the URL, transfers the file to a temporary name, verifies it and renames it.
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
from tsx_runtime.sources.urls import AllowList, ModelUrl, Rules, file_name, parse_url, store_hint

NO_SOURCES: Mapping[str, Source] = {}
SSE_KMS = {"x-amz-server-side-encryption": "aws:kms"}


class Trust(enum.Enum):
    """The origin of a URL, which decides which URLs are allowed."""

    CLIENT = "a client of the management API: allowed_urls decides"
    OPERATOR = "the command line or the configuration: they may name any URL"


class Fetcher:
    """Downloads into a store by blocking calls in threads; each file has one transfer at a time."""

    def __init__(
        self,
        settings: Settings,
        store: Path | None = None,
        suffixes: tuple[str, ...] = ARCHIVE_SUFFIXES,
        sources: Mapping[str, Source] = NO_SOURCES,
        stop: threading.Event | None = None,
    ) -> None:
        """Download into `store`, by default the model store, until `stop` is set.

        Raises:
            SettingError: An entry of the allow list cannot be read.
        """
        self._settings = settings
        self._directory = store or settings.model_store
        self._suffixes = suffixes
        self._sources = sources  # plugins, by URL scheme
        self._allow_list = AllowList(settings.allowed_urls)
        self._stop = stop or threading.Event()
        self._lock = threading.Lock()
        self._active_targets: set[Path] = set()
        self.startup_archives: set[Path] = set()  # archives that the operator named at startup

    def close(self) -> None:
        self._stop.set()

    def local_file(self, text: str, trust: Trust) -> Path | None:
        """Return the path of a `file:` URL that is used in place, or None for any other URL.

        Files in the store, files that the operator has named, and directories are used in place.

        Raises:
            ModelNotFound: The path is neither used in place nor allowed.
            DownloadFailed: The path does not exist, or its digest differs from that in the URL.
        """
        url = parse_url(text, self._sources)
        if url.scheme != "file":
            return None
        path, store = Path(unquote(url.path)), self._directory
        is_registrable = store is not None and is_inside(path, store)
        is_registrable = is_registrable or path.resolve() in {
            archive.resolve() for archive in self.startup_archives
        }
        if not (is_registrable or trust is Trust.OPERATOR or self._allow_list.allows(url)):
            raise ModelNotFound(
                f"Given URL {redacted(text)} does not match any allowed URL(s). {store_hint(store)}"
            )
        if not path.exists():
            raise _download_error(url, f"{path} does not exist")
        if not (is_registrable or store is None or trust is Trust.OPERATOR or path.is_dir()):
            return None
        try:
            check_digest(path, url.sha256)
        except (DownloadFailed, OSError) as error:
            raise _download_error(url, str(error)) from error
        return path

    def fetch(
        self, text: str, trust: Trust, *, sse_kms: bool = False, taken_paths: Collection[Path] = ()
    ) -> Path:
        """Download an archive and return its path in the store.

        If the file would get one of `taken_paths`, it gets a numbered name instead.

        Raises:
            ModelNotFound: The URL is not allowed, or there is no store.
            ModelFileExists: The store has another file of that name.
            Conflict: Another registration downloads the file.
            BadRequest: The URL cannot be read.
            DownloadFailed: The transfer or the verification failed.
        """
        url = parse_url(text, self._sources)
        if trust is Trust.CLIENT:
            self._allow_list.check(url, text)
        directory = self._directory
        if directory is None:
            raise ModelNotFound(f"The archive at {text} needs a model store. {store_hint(None)}")
        target = directory / file_name(url, self._suffixes)
        with self._lock:
            if target in taken_paths:
                target = next(
                    candidate
                    for number in itertools.count(2)
                    if not os.path.lexists(candidate := _numbered_path(target, number))
                )
            if target in self._active_targets:
                raise Conflict(
                    f"{target.name} is already being downloaded by another registration; wait for"
                    " it, or use another file name"
                )
            if os.path.lexists(target):
                raise ModelFileExists(f"Model file already exists {target.name}")
            self._active_targets.add(target)
        try:
            self._download(url, target, trust, sse_kms)
        except DownloadFailed as error:
            raise _download_error(url, error.message) from error
        finally:
            self._active_targets.discard(target)
        return target

    def _download(self, url: ModelUrl, target: Path, trust: Trust, sse_kms: bool) -> None:
        check: Callable[[ModelUrl], None] = (
            self._allow_list.check if trust is Trust.CLIENT else lambda url: None
        )
        is_unrestricted = self._settings.allow_private_urls or trust is Trust.OPERATOR
        may_be_private: Callable[[ModelUrl], bool] = (
            (lambda url: True) if is_unrestricted else self._allow_list.names_host
        )
        headers = SSE_KMS if sse_kms else {}
        rules = Rules(
            check, may_be_private, self._settings.max_archive_size, headers, self._stop.is_set
        )
        url_digest = hashlib.sha256(url.text.encode()).hexdigest()[:16]
        # The digest keeps this transfer from resuming the transfer of another URL.
        part = target.with_name(f".{target.name}.{url_digest}.part")
        if url.scheme in self._sources:
            download_from_plugin(
                self._sources[url.scheme], url, part, self._settings.max_archive_size
            )
        elif url.scheme == "file":
            copy_file(Path(unquote(url.path)), part, self._settings.max_archive_size)
        elif url.scheme == "s3":
            # The import is slow, so it happens only for a download.
            from tsx_runtime.sources import s3

            s3.download(url, part, rules, self._settings.s3_endpoint_url)
        else:
            from tsx_runtime.sources import http_download

            http_download.download(url, part, rules)
        try:
            check_digest(part, url.sha256)
            move_into_place(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _download_error(url: ModelUrl, reason: str) -> DownloadFailed:
    return DownloadFailed(redacted(f"Failed to download archive from: {url.text}: {reason}."))


def _numbered_path(file: Path, number: int) -> Path:
    """Return the path with a number in its name: m.mar becomes m-2.mar."""
    name, dot, suffix = file.name.partition(".")
    return file.with_name(f"{name}-{number}{dot}{suffix}")


def download_from_plugin(source: Source, url: ModelUrl, part: Path, max_bytes: int) -> None:
    """Make a plugin write the file.

    Raises:
        DownloadFailed: The plugin raised, or the file is too large.
    """
    part.unlink(missing_ok=True)
    try:
        source(url.text, part, max_bytes)
        size = part.stat().st_size
    except Exception as error:  # the boundary to the plugin's code
        part.unlink(missing_ok=True)
        raise DownloadFailed(
            f"the plugin for {url.scheme} says: {error or type(error).__name__}"
        ) from error
    if size > max_bytes:
        part.unlink()
        raise DownloadFailed(f"it has {size} bytes, and max_archive_size is {max_bytes}")


def copy_file(source: Path, part: Path, max_bytes: int) -> None:
    """Copy a local file.

    Raises:
        DownloadFailed: The file cannot be read, written, or is too large.
    """
    part.unlink(missing_ok=True)
    try:
        with open_source(source) as file, open(part, "xb", opener=private_opener) as copy:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise DownloadFailed(f"it has {size} bytes, and max_archive_size is {max_bytes}")
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


def check_digest(file: Path, expected: str | None) -> None:
    """Compare the SHA-256 of a file with the expected one, if any.

    Raises:
        DownloadFailed: They differ.
    """
    if expected is None:
        return
    with file.open("rb") as content:
        digest = content_digest(content)
    if digest != expected:
        raise DownloadFailed(f"its sha-256 is {digest}, not {expected}")


def move_into_place(part: Path, target: Path) -> None:
    """Give a complete file its final name, unless another file has it.

    Raises:
        ModelFileExists: Another file has the name.
    """
    try:
        os.link(part, target)  # Unlike a rename, a link never replaces a file.
    except FileExistsError:
        raise ModelFileExists(f"Model file already exists {target.name}") from None
    except OSError:  # The file system has no links.
        part.rename(target)
        return
    part.unlink()
