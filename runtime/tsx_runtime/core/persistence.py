"""Persists changes to a running server: one JSON file per model, written outside the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tsx_archiver.errors import CacheError
from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.locks import FileLock
from tsx_archiver.storage.private_directory import check_directory, private_directory
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.schema import Settings

LOCK = "lock"  # the file that the server which writes there has locked

logger = logging.getLogger("tsx.state")


class StateStore:
    """The saved state of each model, by part.

    Not thread safe: for the event loop; a separate thread writes.
    """

    def __init__(self, directory: Path | None, *, replaces: bool = False) -> None:
        """Without a directory, or where it cannot be written, it is kept as long as the server
        runs.

        Of several servers with one directory the first one writes there. Another one starts with
        what it finds, and writes what it has to once the first one has ended: in a rolling update
        it is started before that. `replaces`: the first one ends soon.
        """
        self.directory = directory
        self._lock: FileLock | None = None  # held by the server that writes there
        self._waiting: dict[Path, str | None] = {}  # what is to be written once it is
        self._models: dict[str, dict[str, Any]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._warned = False
        if directory is not None:
            try:
                for each in (directory, directory / "models", directory / "rollouts"):
                    check_directory(each)
            except PermissionError as error:
                self._warn_once(str(error.strerror))
                self.directory = directory = None
            except OSError:  # nothing can be read there; a write that fails is logged
                pass
        if directory is not None:
            self._models = _read_all(directory / "models")
            if (directory / LOCK).exists() and not replaces:
                self._own(directory)

    def load(self, name: str) -> dict[str, Any]:
        return dict(self._models.get(name, {}))

    def save(self, name: str, **parts: Any) -> None:
        """Keep these parts, which JSON can carry, beside the others; None forgets one."""
        kept = {
            part: value for part, value in (self.load(name) | parts).items() if value is not None
        }
        if kept == self.load(name):
            return
        if kept:
            self._models[name] = kept
        else:
            self._models.pop(name, None)
        self._write_soon(name, json.dumps(kept, indent=2) + "\n" if kept else None)

    def forget(self, name: str) -> None:
        if self._models.pop(name, None) is not None:
            self._write_soon(name, None)

    async def written(self) -> None:
        """Wait until what was saved is on the disk."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))

    def close(self) -> None:
        """Returns when everything is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _write_soon(self, name: str, text: str | None) -> None:
        if self.directory is None:
            self._warn_once("no usable directory was found")
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(
                1, "tsx-state"
            )  # one, so that what came later is written later
        self._last = self._thread.submit(
            self._write, self.directory, self.directory / "models" / f"{name}.json", text
        )

    def _write(self, directory: Path, file: Path, text: str | None) -> None:
        """In the thread."""
        self._waiting[file] = text
        try:
            private_directory(directory)
            if not self._own(directory):
                return
            for file, text in self._waiting.items():
                if text is None:
                    file.unlink(missing_ok=True)
                else:
                    private_directory(file.parent)
                    with write_atomically(file, mode=0o600) as out:
                        out.write(text.encode())
            self._waiting.clear()
        except OSError as error:
            self._warn_once(f"{file} cannot be written: {error.strerror or error}")

    def _own(self, directory: Path) -> bool:
        """Whether this server, and no other one, writes there."""
        if self._lock is not None:
            return True
        try:
            lock = FileLock(directory / LOCK)
        except OSError:  # what is to be written there fails as well, and is logged then
            return True
        try:
            if not lock.lock_exclusive(wait=False):
                lock.close()
                self._warn_once(f"another running server uses {directory}")
                return False
        except CacheError:  # a file system without locks
            pass
        self._lock = lock
        return True

    def _warn_once(self, why: str) -> None:
        """Once: each further change would say the same."""
        if not self._warned:
            self._warned = True
            lost = "changes made while this server runs, such as traffic, are lost when it stops"
            logger.warning("%s: %s. Set state_dir to a directory of its own", lost, why)


def state_directory(settings: Settings, env: Mapping[str, str] = os.environ) -> Path | None:
    """`state_dir`, else one in the model store, else one of the user's that is known by the
    server's address. None where neither can be.
    """
    if settings.state_dir is not None:
        return settings.state_dir
    store = settings.model_store
    if store is not None and store.is_dir() and _can_be_written(store / ".tsx"):
        try:
            check_directory(store / ".tsx")
        except OSError as error:
            logger.warning(
                "changes made while this server runs are not saved in the model store: %s",
                error.strerror,
            )
        else:
            return store / ".tsx"
    address = parse_address(settings.inference_address)
    if address.scheme != "unix" and not address.port:  # another one at each start
        return None
    home = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111  # where there is no home, Path raises
    directory = (
        Path(home)
        / "tsx"
        / re.sub(r"[^A-Za-z0-9.]+", "_", settings.inference_address.partition(":")[2]).strip("_")
    )
    return directory if _can_be_written(directory) else None


def _can_be_written(directory: Path) -> bool:
    """Whether it, or what it would be made in, can."""
    there = next(
        (path for path in (directory, *directory.parents) if os.access(path, os.F_OK)), None
    )
    return there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _read_all(directory: Path) -> dict[str, dict[str, Any]]:
    try:
        files = sorted(directory.glob("*.json"))
    except OSError:
        return {}
    return {file.stem: kept for file in files if (kept := _read(file))}


def _read(file: Path) -> dict[str, Any]:
    """Empty, and logged, where it is not what was written."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(kept, dict):
            raise TypeError("it holds no object")
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s is ignored, and the model's traffic in it: %s", file, error)
        return {}
    return kept
