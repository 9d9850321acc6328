"""The copying of log lines about a version (for example that it started or died).

The lines are copied to the stored output of the version's workers, which the web page shows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tsx_runtime.core.models.model import Model
from tsx_runtime.shared.redaction import redacted

WORKER_ID = "server"  # stored in place of a worker's id

_LOGGER = "tsx"
VERSION_LABEL = re.compile(r'Model "([^"]+)" \[Version ([^\]]+)\]')


class _VersionLogHandler(logging.Handler):
    def __init__(self, models: Mapping[str, Model]) -> None:
        super().__init__(logging.INFO)
        self._models = models

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        match = VERSION_LABEL.search(text)
        model = self._models.get(match[1]) if match else None
        version = model.versions.get(match[2]) if model is not None and match else None
        if version is not None:
            for line in redacted(text).splitlines():
                version.stats.error_log.add_line(
                    record.created, WORKER_ID, record.levelname.lower(), line
                )


@contextmanager
def server_log(models: Mapping[str, Model]) -> Iterator[None]:
    """Copy the server's log lines about versions while the context is open."""
    logger, handler = logging.getLogger(_LOGGER), _VersionLogHandler(models)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
