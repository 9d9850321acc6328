"""The decisions of rollouts, each with its numbers: in memory for who asks, and in a file of JSON lines for each model."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MOST_LINES = 1000  # of a model that are shown

logger = logging.getLogger("tsx.rollout")


class Logs:
    """A file of JSON lines for each model, written by a thread; without a directory, a list."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory and directory / "rollouts"
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._thread = ThreadPoolExecutor(1, "tsx-rollout-log")

    def add(self, name: str, entry: dict[str, Any]) -> None:
        lines = self._of(name)
        lines.append(entry)
        del lines[:-MOST_LINES]
        if self._directory is not None:
            self._thread.submit(self._write, self._directory / f"{name}.jsonl", json.dumps(entry))

    def read(self, name: str) -> list[dict[str, Any]]:
        return list(self._of(name))

    def close(self) -> None:
        self._thread.shutdown()

    def _of(self, name: str) -> list[dict[str, Any]]:
        if name not in self._lines:
            self._lines[name] = [] if self._directory is None else _read_lines(self._directory / f"{name}.jsonl")
        return self._lines[name]

    def _write(self, file: Path, line: str) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as out:
                out.write(f"{line}\n")
        except OSError as error:
            logger.warning("a decision of a rollout is in no file: %s cannot be written: %s", file, error.strerror or error)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()[-MOST_LINES:]
        return [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        logger.warning("the log of rollouts %s cannot be read: %s", file, error)
        return []
