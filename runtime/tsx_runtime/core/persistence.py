"""The saved state of models: one JSON file per model, written outside the event loop."""

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

LOCK = "lock"  # name of the file that the writing server locks

logger = logging.getLogger("tsx.state")


class StateStore:
    """The saved state of each model, by part.

    Its methods are called in the event loop; a thread writes the files.
    """

    def __init__(self, directory: Path | None, *, replaces: bool = False) -> None:
        """Read the saved state; without a writable directory, the state ends with the server.

        If several servers share a directory, the first one writes. Another one reads the state at
        its start, and writes its changes after the first one has ended.

        Args:
            directory: The directory of the state.
            replaces: Whether this server replaces the first one, which ends soon.
        """
        self.directory = directory
        self._lock: FileLock | None = None  # held by the writing server
        # Texts that are not written yet, by file; None removes the file.
        self._unwritten: dict[Path, str | None] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._last_write: Future[None] | None = None
        self._has_warned = False
        if directory is not None:
            try:
                for part in (directory, directory / "models", directory / "rollouts"):
                    check_directory(part)
            except PermissionError as error:
                self._warn_once(str(error.strerror))
                self.directory = directory = None
            except OSError:  # There is nothing to read. A write that fails will be logged.
                pass
        if directory is not None:
            self._models = _read_all(directory / "models")
            if (directory / LOCK).exists() and not replaces:
                self._lock_directory(directory)

    def load(self, name: str) -> dict[str, Any]:
        return dict(self._models.get(name, {}))

    def save(self, name: str, **parts: Any) -> None:
        """Save parts of a model as JSON, in addition to the others; None removes a part."""
        saved = {
            part: value for part, value in (self.load(name) | parts).items() if value is not None
        }
        if saved == self.load(name):
            return
        if saved:
            self._models[name] = saved
        else:
            self._models.pop(name, None)
        self._write_soon(name, json.dumps(saved, indent=2) + "\n" if saved else None)

    def forget(self, name: str) -> None:
        if self._models.pop(name, None) is not None:
            self._write_soon(name, None)

    async def written(self) -> None:
        """Wait until all saved state is on the disk."""
        if self._last_write is not None:
            await asyncio.shield(asyncio.wrap_future(self._last_write))

    def close(self) -> None:
        """Write all saved state, and release the directory."""
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
            # A single thread writes the changes in their order.
            self._thread = ThreadPoolExecutor(1, "tsx-state")
        self._last_write = self._thread.submit(
            self._write, self.directory, self.directory / "models" / f"{name}.json", text
        )

    def _write(self, directory: Path, file: Path, text: str | None) -> None:
        """Write a file, or remove it if `text` is None; this runs in the thread."""
        self._unwritten[file] = text
        try:
            private_directory(directory)
            if not self._lock_directory(directory):
                return
            for file, text in self._unwritten.items():
                if text is None:
                    file.unlink(missing_ok=True)
                else:
                    private_directory(file.parent)
                    with write_atomically(file, mode=0o600) as out:
                        out.write(text.encode())
            self._unwritten.clear()
        except OSError as error:
            self._warn_once(f"{file} cannot be written: {error.strerror or error}")

    def _lock_directory(self, directory: Path) -> bool:
        """Lock the directory, if possible, and tell whether this server may write there."""
        if self._lock is not None:
            return True
        try:
            lock = FileLock(directory / LOCK)
        except OSError:  # The write will fail too, and log the reason.
            return True
        try:
            if not lock.lock_exclusive(wait=False):
                lock.close()
                self._warn_once(f"another running server uses {directory}")
                return False
        except CacheError:  # The file system has no locks.
            pass
        self._lock = lock
        return True

    def _warn_once(self, problem: str) -> None:
        """Log the first problem only, since each later change would repeat it."""
        if not self._has_warned:
            self._has_warned = True
            loss = "changes made while this server runs, such as traffic, are lost when it stops"
            logger.warning("%s: %s. Set state_dir to a directory of its own", loss, problem)


def state_directory(settings: Settings, env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory for saved state, or None if there is none.

    The path is absolute, since workers run in other directories. It is `state_dir`, or else `.tsx` in the model store, or else a directory of the user with the
    server's address as its name.
    """
    if settings.state_dir is not None:
        return settings.state_dir.absolute()
    store = settings.model_store and settings.model_store.absolute()
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
    if address.scheme != "unix" and not address.port:  # The port will differ at each start.
        return None
    # `Path.expanduser` would raise without a home directory.
    home = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    directory = (
        Path(home)
        / "tsx"
        / re.sub(r"[^A-Za-z0-9.]+", "_", settings.inference_address.partition(":")[2]).strip("_")
    )
    return directory if _can_be_written(directory) else None


def _can_be_written(directory: Path) -> bool:
    """Tell whether the directory, or its nearest existing parent, can be written."""
    existing = next(
        (path for path in (directory, *directory.parents) if os.access(path, os.F_OK)), None
    )
    return existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _read_all(directory: Path) -> dict[str, dict[str, Any]]:
    try:
        files = sorted(directory.glob("*.json"))
    except OSError:
        return {}
    return {file.stem: parts for file in files if (parts := _read(file))}


def _read(file: Path) -> dict[str, Any]:
    """Read a file; an invalid one is logged, and the result is empty."""
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(parts, dict):
            raise TypeError("it holds no object")
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s is ignored, and the model's traffic in it: %s", file, error)
        return {}
    return parts
