"""`TS_BENCHMARK=True`: profiles the worker's Python code into files of cProfile.

Contract section 9.3.
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

NEWEST = "tsPythonProfile.prof"  # TorchServe's name
INTERVAL = 1.0  # seconds between writes, which take as long as many a batch

Result = TypeVar("Result")

logger = logging.getLogger("tsx.worker")


def is_wanted() -> bool:
    return os.environ.get("TS_BENCHMARK", "").lower() in ("true", "1")


class Profile:
    """Calls under the profiler.

    Each worker has a file of its own; the last that was written is also there under TorchServe's
    name.
    """

    def __init__(self, model: str, worker: str) -> None:
        self._directory = Path(tempfile.gettempdir())
        self._path = self._directory / f"tsPythonProfile-{model}-{worker}.prof"
        self._profile = cProfile.Profile()
        self._written = 0.0
        logger.info(
            "TS_BENCHMARK is set: the worker is profiled into %s, and is slower for it", self._path
        )

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        self._profile.enable()
        try:
            return function(*arguments)
        finally:
            self._profile.disable()
            if time.monotonic() - self._written > INTERVAL:
                self.write()

    def write(self) -> None:
        """By renaming: the directory is open to all users, and every reader gets a complete
        file.
        """
        self._written = time.monotonic()
        with suppress(OSError):  # a full disk ends no worker
            for target in (self._path, self._directory / NEWEST):
                descriptor, name = tempfile.mkstemp(dir=self._directory, suffix=".prof")
                os.close(descriptor)
                fresh = Path(name)
                try:
                    if target == self._path:
                        self._profile.dump_stats(name)
                    else:
                        shutil.copyfile(self._path, name)
                    fresh.replace(target)
                finally:
                    fresh.unlink(missing_ok=True)
