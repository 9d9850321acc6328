"""The bearer tokens: given by the user, or made up by the server, which then expire and are kept in a file (contract 1.5)."""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from tsx_archiver.storage.atomic_file import whole_file
from tsx_archiver.storage.private_directory import warn_if_replaceable
from tsx_runtime.errors import BadRequest, InvalidToken, SettingError, TsxError
from tsx_runtime.settings.schema import Settings

LENGTH = 18  # random bytes of a token that is made up; TorchServe's six can be guessed within its hour by a fast client
FAILED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"  # of the way to a new token
KINDS = ("management", "inference")  # that a client can renew


class BearerToken:
    """One token. `lifetime` (seconds) makes it one that expires and can be renewed; `clock` is monotonic."""

    def __init__(self, token: str, lifetime: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.token = token
        self.lifetime = lifetime
        self._clock = clock
        self._until = None if lifetime is None else clock() + lifetime
        self.on_change: list[Callable[[], None]] = []  # called when what was right is wrong now

    @classmethod
    def made_up(cls, lifetime: float | None = None, clock: Callable[[], float] = time.monotonic) -> BearerToken:
        return cls(_draw(), lifetime, clock)

    @property
    def seconds_left(self) -> float | None:
        """None: it does not expire."""
        return None if self._until is None else max(0.0, self._until - self._clock())

    def is_right(self, authorization: bytes) -> bool:
        """`authorization` is the header's value. The comparison takes the same time wherever the first difference lies."""
        scheme, _, given = authorization.partition(b" ")
        right = hmac.compare_digest(given.strip(), self.token.encode())
        return right and scheme.lower() == b"bearer" and self.seconds_left != 0

    def renew(self, token: str) -> None:
        assert self.lifetime is not None
        self.token = token
        self._until = self._clock() + self.lifetime
        for listener in self.on_change:
            listener()


class Keys(NamedTuple):
    """None: no token is needed. Where the server made up a key, `file` has all of them."""

    inference: BearerToken | None = None
    management: BearerToken | None = None
    api: BearerToken | None = None  # of `/token`
    file: Path | None = None

    def renew(self, kind: str) -> None:
        """Raises InvalidToken for a kind that there is not, as TorchServe does, and BadRequest for a token that is the user's own.

        Where the new one cannot be written, the old one stays valid: TsxError.
        """
        key: BearerToken | None = getattr(self, kind) if kind in KINDS else None
        if key is None:
            raise InvalidToken(f"{FAILED}. Parameter type is {kind!r}: it must be {' or '.join(KINDS)}.")
        if key.lifetime is None:
            raise BadRequest(f"The {kind} token was set when the server was started, so it cannot be changed while the server runs.")
        token = _draw()
        try:
            self.write({kind: token})
        except OSError as error:
            raise TsxError(f"The new {kind} token cannot be written to {self.file}: {error.strerror}. The old one stays valid.") from error
        key.renew(token)

    def write(self, new: Mapping[str, str] = {}) -> None:
        """Replace the file, readable by its owner alone: a reader sees the old one or the new one. Raises OSError.

        `new`: tokens, by their kind, that are about to be right.
        """
        if self.file is None:
            return
        content = {
            name: _written_keys(key, new.get(name))
            for name, key in (("management", self.management), ("inference", self.inference), ("API", self.api))
            if key
        }
        with whole_file(self.file, mode=0o600, durable=False) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")

    def remove(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()


def build_keys(settings: Settings, clock: Callable[[], float] = time.monotonic) -> Keys:
    """Nothing is written yet: see `start_keys`."""
    if settings.disable_token_authorization:
        return Keys()
    given = {kind: BearerToken(token) for kind in (*KINDS, "api") if (token := getattr(settings, f"{kind}_token"))}
    if not settings.generate_tokens:
        return Keys(given.get("inference"), given.get("management"), given.get("api"))
    lifetime = settings.token_expiration_min * 60
    inference, management = (given.get(kind) or BearerToken.made_up(lifetime, clock) for kind in ("inference", "management"))
    all_given = len(given) == len(KINDS) + 1
    return Keys(inference, management, given.get("api") or BearerToken.made_up(), None if all_given else settings.key_file.absolute())


def start_keys(settings: Settings) -> Keys:
    """The keys, and their file where some were made up. Raises SettingError where it cannot be written."""
    keys = build_keys(settings)
    try:
        keys.write()
    except OSError as error:
        raise SettingError(f"the tokens cannot be written to key_file '{keys.file}': {error.strerror}; name another place") from error
    if keys.file is not None:
        warn_if_replaceable("key_file", keys.file)
    return keys


def _draw() -> str:
    return secrets.token_urlsafe(LENGTH)


def _written_keys(key: BearerToken, new: str | None) -> dict[str, str]:
    left = key.seconds_left if new is None else key.lifetime
    if left is None:
        return {"key": key.token}
    until = datetime.now(timezone.utc) + timedelta(seconds=left)
    return {"key": new or key.token, "expiration time": until.isoformat().replace("+00:00", "Z")}
