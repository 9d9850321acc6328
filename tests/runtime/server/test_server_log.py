"""The server's log lines about a version, which are kept with its workers' output."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

from tsx_runtime.core.telemetry.error_log import ErrorLog
from tsx_runtime.server.server_log import server_log
from tsx_runtime.settings.schema import Settings


def test_only_lines_about_a_version_are_kept_without_secrets() -> None:
    log = ErrorLog()
    model = SimpleNamespace(versions={"1.0": SimpleNamespace(stats=SimpleNamespace(error_log=log))})
    with server_log(Settings()) as handler:
        handler.models = cast(Any, {"cats": model})
        logger = logging.getLogger("tsx.supervisor")
        logger.warning(
            'Model "cats" [Version 1.0]: no weights at http://me:hunter2@host/m?token=hunter2'
        )
        logger.warning('Model "dogs" [Version 1.0]: no weights')
        logger.warning("no model at all")
    logging.getLogger("tsx.supervisor").warning('Model "cats" [Version 1.0]: too late')
    assert [(line.stream[:4], line.text) for line in log.lines] == [
        ("warn", 'Model "cats" [Version 1.0]: no weights at http://***@host/m?token=***')
    ]
