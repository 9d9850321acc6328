"""The profiler of a worker's Python code, which `TS_BENCHMARK=True` turns on.

It writes files of cProfile. See docs/reference/torchserve.md.
"""

from __future__ import annotations

import cProfile
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

NEWEST_PROFILE = "tsPythonProfile.prof"  # TorchServe's name for it
WRITE_INTERVAL_S = 1.0  # Profiles are not written after every batch: a write takes as long as many.

Result = TypeVar("Result")

logger = logging.getLogger("tsx.worker")


def is_enabled() -> bool:
    """Tell whether the user has turned on the profiler."""
    return os.environ.get("TS_BENCHMARK", "").lower() in ("true", "1")


class Profile:
    """The profile of a worker's calls.

    Each worker has its own file. The newest one is copied under TorchServe's name.
    """

    def __init__(self, model: str, worker: str) -> None:
        self._directory = Path(tempfile.gettempdir())
        self._path = self._directory / f"tsPythonProfile-{model}-{worker}.prof"
        self._profile = cProfile.Profile()
        self._written_at = 0.0
        logger.info(
            "TS_BENCHMARK is set: the worker is profiled into %s, and is slower for it", self._path
        )

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function under the profiler."""
        self._profile.enable()
        try:
            return function(*arguments)
        finally:
            self._profile.disable()
            if time.monotonic() - self._written_at > WRITE_INTERVAL_S:
                self.write()

    def write(self) -> None:
        """Write the files by renaming, so that every reader gets a complete file.

        A direct write to a known name would be unsafe, since all users may write to the directory.
        """
        self._written_at = time.monotonic()
        with suppress(OSError):  # A full disk must not end the worker.
            for target in (self._path, self._directory / NEWEST_PROFILE):
                descriptor, name = tempfile.mkstemp(dir=self._directory, suffix=".prof")
                os.close(descriptor)
                temporary_path = Path(name)
                try:
                    if target == self._path:
                        self._profile.dump_stats(name)
                    else:
                        shutil.copyfile(self._path, name)
                    temporary_path.replace(target)
                finally:
                    temporary_path.unlink(missing_ok=True)
