"""Sets up the server's log: stderr, or rotated files with TorchServe's names and line formats."""

from __future__ import annotations

import logging
import logging.config
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.line_log import ACCESS_LOG, MODEL_METRICS, TS_METRICS
from tsx_runtime.shared.log_format import (
    JsonLines,
    escaped,
    has_colour,
    is_terminal,
    level_of,
    loss_line,
    request_suffix,
    writes_json,
)
from tsx_runtime.shared.nonblocking_output import LossyOutput, log_in_background
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.targets.observability.log4j_config import (
    OWN_WAY,
    LogConfig,
    apply_own_way,
    read_log_config,
)
from tsx_runtime.targets.observability.log_file import LogFile
from tsx_runtime.targets.observability.server_log import LABEL
from tsx_runtime.targets.observability.worker_output import MODEL_LOG

CONSOLE = "%(asctime)s %(levelname)-7s %(message)s"
IN_FILES = "%(asctime)s [%(levelname)-5s] %(threadName)s %(name)s - %(message)s"
SERVER_LOG = "ts_log.log"
FILES = {  # loggers that have files of their own; whether these are metrics
    "access_log.log": (ACCESS_LOG, False),
    "model_log.log": (MODEL_LOG, False),
    "ts_metrics.log": (TS_METRICS, True),
    "model_metrics.log": (MODEL_METRICS, True),
}
OWN_LOGGERS = frozenset(name for name, _ in FILES.values())
METRICS = frozenset({TS_METRICS, MODEL_METRICS})


def set_up_logging(settings: Settings, notices: Iterable[str] = ()) -> None:
    """Applies for the life of the process. `notices` are warnings of the settings.

    Raises SettingError where a file cannot be written, or `log_config` cannot be used.
    """
    logging.addLevelName(logging.WARNING, "WARN")
    config = LogConfig()
    if settings.log_config is not None and is_configured(settings):
        apply_own_way(settings.log_config)
        root = logging.getLogger()
        log_in_background(list(root.handlers), root.level)
    else:
        if settings.log_config is not None:
            config = read_log_config(settings.log_config)
        log_in_background(_handlers(settings, config))
    logging.getLogger("uvicorn").setLevel(
        logging.WARNING
    )  # uvicorn logs its own start, once for each address
    logging.getLogger("uvicorn.error").addFilter(_says_more)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    for name, level in config.levels.items():
        logging.getLogger(name).setLevel(level)
    if (
        settings.metrics_location is not None
        and settings.log_location is None
        and settings.metrics_mode == "prometheus"
    ):
        text = (
            "metrics_location: has no effect while metrics_mode is prometheus; set metrics_mode ="
            " log for lines as well"
        )
        logging.getLogger("tsx.server").warning(text)
    if config.left_out:
        logging.getLogger("tsx.server").info(
            "log_config: levels, sizes and numbers of files are used; not %s",
            ", ".join(config.left_out),
        )
    for notice in notices:
        logging.getLogger("tsx.server").warning("%s", notice)


def is_configured(settings: Settings) -> bool:
    """Whether the user's own logging configuration is used."""
    return settings.log_config is not None and settings.log_config.suffix.lower() in OWN_WAY


def _handlers(settings: Settings, config: LogConfig) -> Iterator[logging.Handler]:
    console = logging.StreamHandler(sys.stderr)
    is_json = writes_json(settings.log_format, in_files=settings.log_location is not None)
    console.setFormatter(
        ServerJsonFormatter()
        if is_json
        else (
            ShortFormatter(colour=has_colour(sys.stderr))
            if is_terminal(sys.stderr)
            else TextLogFormatter(CONSOLE)
        )
    )
    raw = getattr(sys.stderr, "buffer", None)
    if is_json and isinstance(raw, LossyOutput):
        raw.report_loss = loss_line
    of_metrics = settings.metrics_location or settings.log_location
    if of_metrics is not None:
        console.addFilter(
            lambda record: record.name not in METRICS
        )  # these are for programs, and in files
    yield console
    shape = ServerJsonFormatter() if is_json else TextLogFormatter(IN_FILES)
    if settings.log_location is not None:
        yield _file(
            settings.log_location / SERVER_LOG,
            config,
            lambda record: record.name not in OWN_LOGGERS,
            shape,
        )
    for file, (logger, is_metrics) in FILES.items():
        directory = of_metrics if is_metrics else settings.log_location
        if directory is not None:
            # Metrics are for programs that know their lines.
            own = TextLogFormatter(IN_FILES) if is_metrics else shape
            yield _file(
                directory / file, config, lambda record, logger=logger: record.name == logger, own
            )


def _file(
    path: Path, config: LogConfig, takes: object, shape: logging.Formatter
) -> logging.Handler:
    try:
        handler = LogFile(path.absolute(), config.max_bytes, config.max_files)
    except OSError as error:
        raise SettingError(
            f"log_location, metrics_location: {path} cannot be written: {error.strerror}; name"
            " another directory"
        ) from error
    handler.setFormatter(shape)
    handler.addFilter(takes)  # type: ignore[arg-type]  # any callable is a filter
    return handler


class TextLogFormatter(logging.Formatter):
    """log4j's `%d{ISO8601}`; and lines that are whole already stay as they are.

    Messages may quote URLs, and what others wrote.
    """

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s,%03d"

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if getattr(record, "whole", False) else super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        return escaped(
            redacted(super().formatMessage(record)) + request_suffix(record, record.message)
        )

    def formatException(self, ei: Any) -> str:  # noqa: N802  # logging's name
        return escaped(redacted(super().formatException(ei)))


class ShortFormatter(TextLogFormatter):
    """For a terminal: the time of day, and colour for warnings and errors."""

    _COLOURS: ClassVar = {"warning": "33", "error": "31", "critical": "1;31", "debug": "2"}

    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(message)s")
        self._colour = colour

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        level = level_of(record)
        clock, word = self.formatTime(record, "%H:%M:%S"), "" if level == "info" else f"{level} "
        if self._colour:
            clock, word = (
                f"\x1b[2m{clock}\x1b[0m",
                f"\x1b[{self._COLOURS[level]}m{word}\x1b[0m" if level in self._COLOURS else word,
            )
        return f"{clock} {word}{super().formatMessage(record)}"


class ServerJsonFormatter(JsonLines):
    """JSON lines; log lines about a model also have its name and version as fields."""

    def fields_of(self, record: logging.LogRecord) -> dict[str, object]:
        more = super().fields_of(record)
        named = LABEL.search(record.getMessage())
        return {"model": named[1], "version": named[2], **more} if named else more


def _says_more(record: logging.LogRecord) -> bool:
    """Whether uvicorn's line is not that of `CasedProtocol.send_400_response`, which gives the
    cause.
    """
    return record.msg != "Invalid HTTP request received."
