"""Parses a model's URL and decides whether it is allowed, without a network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tsx_archiver import ARCHIVE_SUFFIXES, is_inside
from tsx_runtime.errors import BadRequest, ModelNotFound, SettingError
from tsx_runtime.shared.redaction import redacted

CHUNK = 1 << 20
SCHEMES = ("http", "https", "s3", "file")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_HOST = re.compile(
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?"
)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_NAMED_HOST = re.compile(
    r"\^?(?:https?\??|http\(s\)\?)://((?:[a-z0-9_]|\\?[.-])+|\\\[[0-9a-f:]+\\?\])(?=[:/]|\(:|$)",
    re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
LONGEST = 4096  # characters of a URL, or of a name in the store
MOST_UNQUOTED = 5  # rounds; dots hidden more deeply are refused anyway


class ModelUrl(NamedTuple):
    text: str  # without the fragment
    scheme: str
    host: str  # in lower case; an s3 URL's bucket
    port: int | None
    path: str
    sha256: str | None  # what the file must have, from the fragment `#sha256=...`


def is_url(text: str) -> bool:
    """`hf:ORG/NAME` is one as well, which `hub` reads."""
    return text.startswith("hf:") or _SCHEME.match(text) is not None


def parse_url(text: str, more: Iterable[str] = ()) -> ModelUrl:
    """`more`: schemes of plugins.

    Raises ModelNotFound, as TorchServe does for what it does not want to look at, and BadRequest
    for what cannot be a URL.
    """
    check_length(text)
    plain, _, fragment = text.partition("#")
    if climbs(plain):
        raise ModelNotFound(f"Relative path is not allowed in url: {text}")
    if any(ord(character) <= 32 or ord(character) == 127 for character in plain):
        raise BadRequest(
            f"The url {text!r} contains spaces or control characters; encode them, such as %20 for"
            " a space."
        )
    try:
        parts = urlsplit(plain)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"The url {text!r} cannot be read: {error}.") from error
    scheme = parts.scheme.lower()
    schemes = (*SCHEMES, *more)
    if scheme not in schemes:
        raise ModelNotFound(
            f"Given URL {plain} does not match any allowed URL(s): its scheme is not one of"
            f" {', '.join(schemes)}"
        )
    if "@" in parts.netloc:
        raise BadRequest(
            "The url contains a user name before its host, which can disguise the host; remove it."
        )
    if (scheme == "file") != (not parts.hostname):
        raise BadRequest(
            f"The url {text!r}"
            f" {'names a host, which file URLs cannot have' if parts.hostname else 'has no host'}."
        )
    return ModelUrl(
        plain, scheme, (parts.hostname or "").lower(), port, parts.path, _digest(fragment)
    )


def check_length(text: str) -> None:
    """Before anything looks at it: patterns of `allowed_urls` may take time that grows with the
    square of it. Raises BadRequest.
    """
    if len(text) > LONGEST:
        raise BadRequest(f"The url has {len(text)} characters; at most {LONGEST} are read.")


def climbs(text: str) -> bool:
    """Whether a path in it could leave its directory, in whatever way the dots are written."""
    for _ in range(MOST_UNQUOTED):
        if ".." in text or "\\" in text or "\0" in text:
            return True
        text, before = unquote(text), text
        if text == before:
            return False
    return True


def in_store(name: str, store: Path | None, absent: str = "Model not found") -> Path:
    """Where the file of that name lies, if it is there; an absolute path counts if it lies in the
    store once its links are resolved.

    Raises ModelNotFound where it would be outside, or there is no store.
    """
    check_length(name)
    if climbs(name):
        raise ModelNotFound(f"Relative path is not allowed in url: {name}")
    if store is None:
        raise ModelNotFound(f"{absent}: {name}. {store_hint(None)}")
    if Path(name).is_absolute() and not is_inside(Path(name), store):
        raise ModelNotFound(f"{name} is not in the store. {store_hint(store)}")
    return store / name


def store_hint(store: Path | None) -> str:
    """Say how a file becomes one that the server can register."""
    if store is None:
        return (
            "This server has no model store; start it with --model-store DIRECTORY, or replace it"
            " without downtime by one that serves both archives: `tsx serve OLD NEW --replace`"
        )
    return (
        f"Copy the file into this server's store, {store.absolute()}, and register it by its name"
    )


def _digest(fragment: str) -> str | None:
    if not fragment:
        return None
    name, _, value = fragment.partition("=")
    if name != "sha256" or not _SHA256.fullmatch(value):
        raise BadRequest(
            f"The url ends in '#{fragment}'; the only supported fragment is #sha256= and 64"
            " hexadecimal digits."
        )
    return value.lower()


def file_name(url: ModelUrl, suffixes: tuple[str, ...] = ARCHIVE_SUFFIXES) -> str:
    """What the file is called in the store.

    Raises BadRequest where that would be no archive's name.
    """
    name = unquote(url.path.rpartition("/")[2])
    if not _FILE_NAME.fullmatch(name) or not name.endswith(suffixes):
        endings = ", ".join(suffixes)
        raise BadRequest(
            f"The url {url.text} does not end in an archive's name: letters, digits and _.+- only,"
            f" then one of {endings}."
        )
    return name


class AllowList:
    """The URLs that a setting allows: each entry is a host, which must be the same, or a pattern
    that must match a whole URL.
    """

    def __init__(self, entries: Sequence[str], setting: str = "allowed_urls") -> None:
        """`setting`: where they come from. Raises SettingError for a pattern that is none."""
        self.entries = tuple(entries)
        self._hosts = frozenset(entry.lower() for entry in entries if _HOST.fullmatch(entry))
        self._patterns = [
            (_compiled(entry, setting), _named_host(entry))
            for entry in entries
            if not _HOST.fullmatch(entry)
        ]

    def allows(self, url: ModelUrl) -> bool:
        return self._lists(url) or any(pattern.fullmatch(url.text) for pattern, _ in self._patterns)

    def names(self, url: ModelUrl) -> bool:
        """Whether an entry allows it that spells its host out: then the host may be in a private
        network.
        """
        return self._lists(url) or any(
            host == url.host and pattern.fullmatch(url.text) for pattern, host in self._patterns
        )

    def _lists(self, url: ModelUrl) -> bool:
        if url.scheme not in _DEFAULT_PORTS:
            return False
        host = f"[{url.host}]" if ":" in url.host else url.host
        port = url.port or _DEFAULT_PORTS[url.scheme]
        return f"{host}:{port}" in self._hosts or (
            host in self._hosts and port == _DEFAULT_PORTS[url.scheme]
        )

    def check(self, url: ModelUrl, shown: str | None = None) -> None:
        """Raises ModelNotFound with TorchServe's words; `shown` is how the client wrote it."""
        if not self.allows(url):
            hint = (
                ""
                if self.entries
                else " (allowed_urls is empty, so models come from the model store only)"
            )
            raise ModelNotFound(
                f"Given URL {redacted(shown or url.text)} does not match any allowed URL(s){hint}"
            )


def _compiled(entry: str, setting: str) -> re.Pattern[str]:
    try:
        return re.compile(entry, re.IGNORECASE)
    except re.error as error:
        raise SettingError(
            f"{setting} holds {entry!r}, which is neither a host nor a regular expression: {error}"
        ) from error


def _named_host(entry: str) -> str | None:
    """The host that a pattern begins with, where it is no pattern itself: `in-house` of
    `http://in-house:.*`. A dot is one.
    """
    found = _NAMED_HOST.match(entry)
    return None if found is None else found[1].replace("\\", "").strip("[]").lower()


class Rules(NamedTuple):
    """The rules of one transfer.

    `check` raises where a URL, also that of a redirect, is not allowed.
    """

    check: Callable[[ModelUrl], None]
    private: Callable[[ModelUrl], bool]  # whether it may lead to an address that is not public
    most: int  # bytes
    headers: Mapping[str, str] = {}
    stopped: Callable[[], bool] = lambda: False
    pause: float = 0.5  # seconds before the second try; it doubles
    # Seconds after which a transfer must have brought as much as a slow one would.
    patience: float = 60.0
