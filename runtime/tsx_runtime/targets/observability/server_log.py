"""Copies of the server's log lines about a version (started, died, could not load).

They are added to the stored output of the version's workers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tsx_runtime.core.models.model import Model
from tsx_runtime.shared.redaction import redacted

WORKER = "server"  # stands for a worker's id

_LOGGER = "tsx"
LABEL = re.compile(r'Model "([^"]+)" \[Version ([^\]]+)\]')


class _VersionLogHandler(logging.Handler):
    def __init__(self, models: Mapping[str, Model]) -> None:
        super().__init__(logging.INFO)
        self._models = models

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        match = LABEL.search(text)
        model = self._models.get(match[1]) if match else None
        version = model.versions.get(match[2]) if model is not None and match else None
        if version is not None:
            for line in redacted(text).splitlines():
                version.stats.error_log.add_line(
                    record.created, WORKER, record.levelname.lower(), line
                )


@contextmanager
def server_log(models: Mapping[str, Model]) -> Iterator[None]:
    """Copy the lines while the context is open."""
    logger, handler = logging.getLogger(_LOGGER), _VersionLogHandler(models)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
