"""The log of a running server: its lines about versions, and the output of its workers.

Lines about a version (for example that it started or died) are copied to the stored output of the
version's workers, which the web page shows.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tsx_runtime.core.models.model import Model
from tsx_runtime.server.log4j_config import is_configured
from tsx_runtime.server.worker_output import worker_output
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.log_format import is_terminal, writes_json
from tsx_runtime.shared.redaction import redacted

WORKER_ID = "server"  # stored in place of a worker's id

_LOGGER = "tsx"
VERSION_LABEL = re.compile(r'Model "([^"]+)" \[Version ([^\]]+)\]')


class ServerLog(logging.Handler):
    """A handler that copies lines about the versions of `models`."""

    def __init__(self, output: str) -> None:
        super().__init__(logging.INFO)
        self.output = output  # path of the socket for the output of workers, if it is collected
        self.models: Mapping[str, Model] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        match = VERSION_LABEL.search(text)
        model = self.models.get(match[1]) if match else None
        version = model.versions.get(match[2]) if model is not None and match else None
        if version is not None:
            for line in redacted(text).splitlines():
                version.stats.error_log.add_line(
                    record.created, WORKER_ID, record.levelname.lower(), line
                )


@contextmanager
def server_log(settings: Settings) -> Iterator[ServerLog]:
    """Collect the output of workers and copy the server's lines while the context is open."""
    with _worker_output(settings) as output:
        logger, handler = logging.getLogger(_LOGGER), ServerLog(output)
        logger.addHandler(handler)
        try:
            yield handler
        finally:
            logger.removeHandler(handler)


def _worker_output(settings: Settings) -> AbstractContextManager[str]:
    """Return a context that collects workers' output, and yields the path of its socket.

    Output is collected for a separate log file, or to convert it to JSON lines. At a terminal, it
    is collected because the output of native code and programs could contain control sequences.
    """
    in_files = settings.log_location is not None
    is_json = writes_json(settings.log_format, in_files=in_files)
    if (in_files or (is_json and not is_configured(settings))) and hasattr(socket, "AF_UNIX"):
        return worker_output(is_json=is_json)
    if (
        sys.platform == "linux"
        and not is_json
        and (is_terminal(sys.stdout) or is_terminal(sys.stderr))
    ):
        return worker_output(at_terminal=True)
    return nullcontext("")
