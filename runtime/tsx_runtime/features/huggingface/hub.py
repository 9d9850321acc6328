"""Models of the Hugging Face Hub, `hf:ORG/NAME@REVISION`.

This module decides which models are allowed; the library huggingface_hub downloads them.
"""

from __future__ import annotations

import glob
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver import OpenArchive, plan_archive
from tsx_archiver.errors import ArchiveError
from tsx_archiver.limits import human
from tsx_archiver.linking import open_linked
from tsx_archiver.metadata.huggingface import Pretrained
from tsx_archiver.pretrained import pretrained_spec
from tsx_runtime.errors import BadRequest, DownloadFailed, ModelNotFound
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources.urls import HUB_SCHEME, check_length, is_hub

SYNTAX = "hf:ORG/NAME or hf:ORG/NAME@REVISION"
_MODEL = re.compile(
    r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?",
    re.ASCII,
)
_INDEX_PATTERNS = ("config.json", "*.index.json")  # files that tell which other files are needed
_API = re.compile("[^?#]*/api/models/.*")  # URLs of the Hub that answer with JSON
_COMMIT = re.compile("[0-9a-f]{40}")
_ETAG = re.compile(r'(?:W/)?"?[0-9A-Za-z][\w.:+=-]*"?', re.ASCII)
_CLIENT_LOCK = threading.Lock()  # held while a thread changes the library's client

LOG_INTERVAL_S = 10.0

Progress = Callable[[int, int], None]  # arguments: fetched bytes, total bytes
logger = logging.getLogger("tsx.registry")


class HubModel(NamedTuple):
    repo: str
    revision: str | None  # a branch, a tag or a commit

    def __str__(self) -> str:
        return f"{HUB_SCHEME}{self.repo}" + (f"@{self.revision}" if self.revision else "")


def parse_hub(text: str) -> HubModel:
    """Parse the name of a model of the Hub.

    Raises:
        BadRequest: The text does not name a model.
    """
    check_length(text)
    match = _MODEL.fullmatch(text)
    if match is None or ".." in text:
        raise BadRequest(
            f"{text!r} does not name a model of the Hugging Face Hub: it must be {SYNTAX}."
        )
    return HubModel(match["repo"], match["revision"])


def check_allowed(model: HubModel, allowed_urls: Sequence[str]) -> None:
    """Check a model against the entries of `allowed_urls` that begin with `hf:`.

    Other entries never allow a model of the Hub: a pattern for URLs must not allow one by accident.

    Raises:
        ModelNotFound: No entry allows the model.
    """
    entries = [entry.removeprefix("^") for entry in allowed_urls]
    patterns = [re.compile(entry, re.IGNORECASE) for entry in entries if is_hub(entry)]
    if not any(
        pattern.fullmatch(text)
        for pattern in patterns
        for text in (str(model._replace(revision=None)), str(model))
    ):
        advice = (
            f"Add {HUB_SCHEME}{model.repo}, or a pattern that begins with {HUB_SCHEME}, to the server's"
            " setting allowed_urls."
        )
        raise ModelNotFound(f"Given URL {model} does not match any allowed URL(s). {advice}")


def open_hub(
    model: HubModel, settings: Settings, progress: Progress, stopped: Callable[[], bool]
) -> OpenArchive:
    """Download and open a model; this blocks.

    Raises:
        BadRequest: The model cannot be served.
        DownloadFailed: The download failed.
    """
    start_time = time.monotonic()
    log = log_progress(model, logger.info)

    def report(done: int, total: int) -> None:
        progress(done, total)
        log(done, total)

    directory = download(
        model, max_bytes=settings.max_archive_size, progress=report, stopped=stopped
    )
    logger.info(
        "%s is commit %s, downloaded in %.1f s",
        model,
        directory.name,
        time.monotonic() - start_time,
    )
    try:
        spec, notes = pretrained_spec(
            directory, source=f"{HUB_SCHEME}{model.repo}", revision=directory.name
        )
        for note in notes:
            if note.startswith("note: "):
                logger.warning("%s: %s", model, note.removeprefix("note: "))
        return open_linked(
            plan_archive(spec), f"{model.repo}@{directory.name}", settings.archive_cache()
        )
    except ArchiveError as error:
        raise BadRequest(f"{model} cannot be served: {error}") from error


def download(
    model: HubModel,
    *,
    max_bytes: int,
    progress: Progress = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Path:
    """Download the files that serving needs, unless the cache has them.

    This blocks: call it in a thread.

    Returns:
        The directory of the files in huggingface_hub's cache; its name is the commit.

    Raises:
        DownloadFailed: The model cannot be read, is too large, or cannot be served.
    """
    try:
        import huggingface_hub  # an optional dependency
        from huggingface_hub import constants, errors
    except ModuleNotFoundError as error:
        raise DownloadFailed(
            f"{model} is fetched by huggingface_hub: pip install 'tsx-serve[transformers]'"
        ) from error

    fetched = total = 0

    def count(size: int) -> None:
        nonlocal fetched
        if stopped():
            raise DownloadFailed("the server stops")
        fetched += size
        if fetched > max_bytes:
            raise DownloadFailed(
                f"{model} has more than {max_bytes} bytes, which is max_archive_size"
            )
        if total:
            progress(min(fetched, total), total)

    _install_check()
    bar = _bar(count)
    page = f"{constants.ENDPOINT}/{model.repo}"
    try:
        directory = Path(
            huggingface_hub.snapshot_download(
                model.repo, revision=model.revision, allow_patterns=_INDEX_PATTERNS, tqdm_class=bar
            )
        )
        sizes = _sizes(model.repo, directory)
        needed_files = Pretrained(directory, tuple(sizes)).needed
        total = sum(sizes[name] for name in needed_files)
        if total > max_bytes:
            raise DownloadFailed(
                f"{model} has {total} bytes to fetch, and max_archive_size is {max_bytes}"
            )
        fetched = sum(sizes[name] for name in needed_files if (directory / name).is_file())
        progress(fetched, total)
        patterns = [glob.escape(name) for name in needed_files]
        huggingface_hub.snapshot_download(
            model.repo, revision=directory.name, allow_patterns=patterns, tqdm_class=bar
        )
        # Files that the cache shares with another commit were not counted, so report the end.
        progress(total, total)
    except ArchiveError as error:
        raise DownloadFailed(f"{model} cannot be served: {error.message}") from error
    except errors.GatedRepoError as error:
        advice = f"Accept its terms at {page}, and set HF_TOKEN to a token of that account"
        raise DownloadFailed(
            f"{model} is gated, and this account may not read it. {advice}."
        ) from error
    except errors.RepositoryNotFoundError as error:
        advice = "Check its name; to read a private one, set HF_TOKEN to a token that may"
        raise DownloadFailed(
            f"{model}: there is no model at {page}, or it is private. {advice}."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadFailed(
            f"{model}: {model.repo} has no revision {model.revision}. Name a branch, a tag or a"
            " commit of it."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        reason = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} cannot be reached ({error.__cause__})"
        )
        advice = "unset it" if constants.HF_HUB_OFFLINE else "check the connection and HF_ENDPOINT"
        raise DownloadFailed(
            f"{model} is not in the cache {constants.HF_HUB_CACHE}, and {reason}; {advice}, or copy"
            " the cache here."
        ) from error
    except DownloadFailed:
        raise
    except Exception as error:  # the boundary to the library and its dependencies
        raise DownloadFailed(
            f"{model} cannot be fetched from {constants.ENDPOINT}: {error or type(error).__name__}"
        ) from error
    return directory


def _install_check() -> None:
    """Make huggingface_hub check responses of the Hub or a mirror before it uses them."""
    import huggingface_hub  # an optional dependency

    with _CLIENT_LOCK:
        client = huggingface_hub.get_session()
        hooks = client.event_hooks
        if _check_response not in hooks["response"]:
            kind = type(client)
            options = {"follow_redirects": client.follow_redirects, "timeout": client.timeout}
            hooks = {**hooks, "response": [*hooks["response"], _check_response]}
            huggingface_hub.set_client_factory(lambda: kind(event_hooks=hooks, **options))


def _check_response(response: Any) -> None:
    """Check the commits, ETags and links of a response, since paths in the cache depend on them.

    huggingface_hub checks the file names itself.

    Raises:
        DownloadFailed: A value could lead out of the cache.
    """
    headers = response.headers
    if response.request.method == "HEAD":
        _require_match(_COMMIT, headers.get("x-repo-commit"))
        _require_match(_ETAG, headers.get("x-linked-etag"), headers.get("etag"))
    elif _API.fullmatch(str(response.url)):  # Other responses are the content of a file.
        _require_match(_API, headers.get("location"), response.links.get("next", {}).get("url"))
        response.read()
        content = response.json() if response.is_success else {}
        for entry in content if isinstance(content, list) else [content]:
            _require_match(_COMMIT, entry.get("sha"))
            _require_match(_ETAG, (entry.get("lfs") or {}).get("oid"))


def _require_match(pattern: re.Pattern[str], *values: Any) -> None:
    for value in values:
        if value is not None and not pattern.fullmatch(str(value)):
            raise DownloadFailed(
                f"{value!r} in the Hub's answer could lead out of the cache. Check HF_ENDPOINT."
            )


def log_progress(model: HubModel, write: Callable[[str], None]) -> Progress:
    """Return a callback that logs the progress at intervals."""
    write(f"downloading {model}")
    last_write = time.monotonic()

    def progress(fetched: int, total: int) -> None:
        nonlocal last_write
        if time.monotonic() - last_write > LOG_INTERVAL_S:
            last_write = time.monotonic()
            write(f"downloading {model}: {human(fetched)} of {human(total)}")

    return progress


def _sizes(repo: str, directory: Path) -> dict[str, int]:
    """Return the sizes of all files of a commit, by name.

    They come from the list of files that huggingface_hub has cached, or else from the disk.
    """
    from huggingface_hub import get_cached_repo_tree  # an optional dependency
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return {
            file.path: file.size for file in get_cached_repo_tree(repo, revision=directory.name)
        }
    except CachedRepoTreeNotFoundError:
        return {
            path.relative_to(directory).as_posix(): path.stat().st_size
            for path in directory.rglob("*")
            if path.is_file()
        }


def _bar(count: Callable[[int], None]) -> type[Any]:
    """Return the class of a hidden progress bar that passes each size to `count`, which may raise.

    A size of 0 is passed too, so that `count` can end a download that stalls.
    """
    from huggingface_hub.utils import tqdm  # an optional dependency

    class CountingBar(tqdm):  # type: ignore[misc]  # The library has no types for it.
        def __init__(self, *args: Any, **options: Any) -> None:
            # The library makes several bars; only the one of this name counts bytes on the disk.
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0) if self._counts else 0)

    return CountingBar
