"""The parser of a model's URL, and the allow lists; this module does not use the network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from tsx_archiver import ARCHIVE_SUFFIXES, is_inside
from tsx_runtime.errors import BadRequest, ModelNotFound, SettingError
from tsx_runtime.shared.redaction import redacted

CHUNK_BYTES = 1 << 20
SCHEMES = ("http", "https", "s3", "file")
HUB_SCHEME = "hf:"  # the scheme of the Hugging Face Hub: `hf:ORG/NAME@REVISION`
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_HOST = re.compile(
    r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?"
)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_LITERAL_HOST = re.compile(
    r"\^?(?:https?\??|http\(s\)\?)://((?:[a-z0-9_]|\\?[.-])+|\\\[[0-9a-f:]+\\?\])(?=[:/]|\(:|$)",
    re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL_CHARS = 4096  # the length of a URL or of a name in the store
MAX_UNQUOTE_ROUNDS = 5  # A text that is still quoted after these rounds is refused.


class ModelUrl(NamedTuple):
    text: str  # the URL, without its fragment
    scheme: str
    host: str  # lower case; an s3 URL's bucket
    port: int | None
    path: str
    sha256: str | None  # the expected digest, from the fragment `#sha256=...`


def is_url(text: str) -> bool:
    return is_hub(text) or _SCHEME.match(text) is not None


def is_hub(text: str) -> bool:
    return text.startswith(HUB_SCHEME)


def parse_url(text: str, plugin_schemes: Iterable[str] = ()) -> ModelUrl:
    """Parse the URL of a model.

    Raises:
        ModelNotFound: The URL is relative or has an unsupported scheme; TorchServe answers 404 too.
        BadRequest: The text is not a URL.
    """
    check_length(text)
    location, _, fragment = text.partition("#")
    if may_leave_directory(location):
        raise ModelNotFound(f"Relative path is not allowed in url: {text}")
    if any(ord(character) <= 32 or ord(character) == 127 for character in location):
        raise BadRequest(
            f"The url {text!r} contains spaces or control characters; encode them, such as %20 for"
            " a space."
        )
    try:
        parts = urlsplit(location)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"The url {text!r} cannot be read: {error}.") from error
    scheme = parts.scheme.lower()
    schemes = (*SCHEMES, *plugin_schemes)
    if scheme not in schemes:
        raise ModelNotFound(
            f"Given URL {location} does not match any allowed URL(s): its scheme is not one of"
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
        location, scheme, (parts.hostname or "").lower(), port, parts.path, _sha256_of(fragment)
    )


def check_length(text: str) -> None:
    """Check the length of a URL, since matching a long one with `allowed_urls` may take long.

    Raises:
        BadRequest: The text is too long.
    """
    if len(text) > MAX_URL_CHARS:
        raise BadRequest(f"The url has {len(text)} characters; at most {MAX_URL_CHARS} are read.")


def may_leave_directory(text: str) -> bool:
    """Tell whether a path in a text could leave its directory, even if its dots are quoted."""
    for _ in range(MAX_UNQUOTE_ROUNDS):
        if ".." in text or "\\" in text or "\0" in text:
            return True
        text, previous = unquote(text), text
        if text == previous:
            return False
    return True


def in_store(name: str, store: Path | None, error_text: str = "Model not found") -> Path:
    """Return the path of a file in the store; the file need not exist.

    An absolute path is accepted if it lies in the store after its links are resolved.

    Raises:
        ModelNotFound: The path lies outside the store, or there is no store.
    """
    check_length(name)
    if may_leave_directory(name):
        raise ModelNotFound(f"Relative path is not allowed in url: {name}")
    if store is None:
        raise ModelNotFound(f"{error_text}: {name}. {store_hint(None)}")
    if Path(name).is_absolute() and not is_inside(Path(name), store):
        raise ModelNotFound(f"{name} is not in the store. {store_hint(store)}")
    return store / name


def store_hint(store: Path | None) -> str:
    """Explain how to put a file where the server can register it."""
    if store is None:
        return (
            "This server has no model store; start it with --model-store DIRECTORY, or replace it"
            " without downtime by one that serves both archives: `tsx serve OLD NEW --replace`"
        )
    return (
        f"Copy the file into this server's store, {store.absolute()}, and register it by its name"
    )


def _sha256_of(fragment: str) -> str | None:
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
    """Return the name of a URL's file in the store.

    Raises:
        BadRequest: The URL does not end in an archive's name.
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
    """The URLs that a setting allows.

    Each entry is a host, which must be equal to the URL's, or a pattern for the whole URL.
    """

    def __init__(self, entries: Sequence[str], setting: str = "allowed_urls") -> None:
        """Parse the entries of `setting`.

        Raises:
            SettingError: An entry is neither a host nor a regular expression.
        """
        self.entries = tuple(entries)
        self._hosts = frozenset(entry.lower() for entry in entries if _HOST.fullmatch(entry))
        self._patterns = [
            (_compile(entry, setting), _literal_host(entry))
            for entry in entries
            if not _HOST.fullmatch(entry)
        ]

    def allows(self, url: ModelUrl) -> bool:
        return self._has_host(url) or any(
            pattern.fullmatch(url.text) for pattern, _ in self._patterns
        )

    def names_host(self, url: ModelUrl) -> bool:
        """Tell whether an entry that allows the URL contains its host literally.

        Then the host's address may be private.
        """
        return self._has_host(url) or any(
            host == url.host and pattern.fullmatch(url.text) for pattern, host in self._patterns
        )

    def _has_host(self, url: ModelUrl) -> bool:
        if url.scheme not in _DEFAULT_PORTS:
            return False
        host = f"[{url.host}]" if ":" in url.host else url.host
        port = url.port or _DEFAULT_PORTS[url.scheme]
        return f"{host}:{port}" in self._hosts or (
            host in self._hosts and port == _DEFAULT_PORTS[url.scheme]
        )

    def check(self, url: ModelUrl, spelling: str | None = None) -> None:
        """Raise an error with TorchServe's text if a URL is not allowed.

        Raises:
            ModelNotFound: The URL is not allowed; the message has the client's `spelling`.
        """
        if not self.allows(url):
            hint = (
                ""
                if self.entries
                else " (allowed_urls is empty, so models come from the model store only)"
            )
            raise ModelNotFound(
                f"Given URL {redacted(spelling or url.text)} does not match any allowed"
                f" URL(s){hint}"
            )


def _compile(entry: str, setting: str) -> re.Pattern[str]:
    try:
        return re.compile(entry, re.IGNORECASE)
    except re.error as error:
        raise SettingError(
            f"{setting} holds {entry!r}, which is neither a host nor a regular expression: {error}"
        ) from error


def _literal_host(entry: str) -> str | None:
    """Return the literal host at the start of a pattern: `in-house` for `http://in-house:.*`.

    A dot counts as a literal.
    """
    match = _LITERAL_HOST.match(entry)
    return None if match is None else match[1].replace("\\", "").strip("[]").lower()


class Rules(NamedTuple):
    """The rules of one transfer."""

    check: Callable[[ModelUrl], None]  # raises an error if a URL or a redirect is not allowed
    may_be_private: Callable[
        [ModelUrl], bool
    ]  # tells whether the URL's address may be a private one
    max_bytes: int
    headers: Mapping[str, str] = {}
    stopped: Callable[[], bool] = lambda: False
    pause_s: float = 0.5  # time before the first retry; it doubles each time
    grace_s: float = 60.0  # time after which a minimum rate is required
    limit: str = "max_archive_size"  # the name of `max_bytes` in messages
