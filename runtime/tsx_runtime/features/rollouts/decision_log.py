"""The decisions of rollouts with their numbers, in memory and in a JSON lines file per model."""

from __future__ import annotations

import json
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tsx_archiver.storage.private_directory import private_directory, private_opener

MAX_LINES = 1000  # newest lines of a model that are kept in memory

logger = logging.getLogger("tsx.rollout")


class DecisionLog:
    """The log of all models. A thread writes it; without a directory, it is only in memory."""

    def __init__(self, directory: Path | None) -> None:
        """Read the log now, so that no request waits for it later."""
        self._directory = directory and directory / "rollouts"
        self._lines: dict[str, list[dict[str, Any]]] = (
            {} if self._directory is None else _read_all(self._directory)
        )
        self._thread = ThreadPoolExecutor(1, "tsx-rollout-log")

    def add(self, name: str, entry: dict[str, Any]) -> None:
        lines = self._lines.setdefault(name, [])
        lines.append(entry)
        del lines[:-MAX_LINES]
        if self._directory is not None:
            self._thread.submit(self._write, self._directory / f"{name}.jsonl", json.dumps(entry))

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the decisions of a model, the newest last."""
        return list(self._lines.get(name, ()))

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown()

    def _write(self, file: Path, line: str) -> None:
        try:
            private_directory(file.parent)
            with open(file, "a", encoding="utf-8", opener=private_opener) as out:
                out.write(f"{line}\n")
        except OSError as error:
            logger.warning(
                "a rollout decision is not saved: %s cannot be written: %s",
                file,
                error.strerror or error,
            )


def _read_all(directory: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        files = sorted(directory.glob("*.jsonl"))
    except OSError:
        return {}
    return {file.stem: _read_lines(file) for file in files}


def _read_lines(file: Path) -> list[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            return [
                entry for line in deque(lines, MAX_LINES) if (entry := _parse(line)) is not None
            ]
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("the log of rollouts %s cannot be read: %s", file, error)
        return []


def _parse(line: str) -> dict[str, Any] | None:
    """Parse a line, which may be incomplete if a server was killed."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
