"""Copies the server's log lines about a version (started, died, could not load) to the stored
output of its workers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tsx_runtime.core.models.model import Model
from tsx_runtime.shared.redaction import redacted

WORKER = "server"  # in place of a worker's id

_LOGGER = "tsx"
LABEL = re.compile(r'Model "([^"]+)" \[Version ([^\]]+)\]')


class _VersionLogHandler(logging.Handler):
    def __init__(self, models: Mapping[str, Model]) -> None:
        super().__init__(logging.INFO)
        self._models = models

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        named = LABEL.search(text)
        model = self._models.get(named[1]) if named else None
        version = model.versions.get(named[2]) if model is not None and named else None
        if version is not None:
            for line in redacted(text).splitlines():
                version.stats.error_log.add_line(
                    record.created, WORKER, record.levelname.lower(), line
                )


@contextmanager
def server_log(models: Mapping[str, Model]) -> Iterator[None]:
    """While this is open."""
    logger, handler = logging.getLogger(_LOGGER), _VersionLogHandler(models)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
