"""The setup of the server's log: stderr, or rotated files with TorchServe's names and formats."""

from __future__ import annotations

import logging
import logging.config
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from tsx_runtime.errors import SettingError
from tsx_runtime.server.log4j_config import (
    LogConfig,
    apply_dict_config,
    is_configured,
    read_log_config,
)
from tsx_runtime.server.log_file import LogFile
from tsx_runtime.server.server_log import VERSION_LABEL
from tsx_runtime.server.worker_output import MODEL_LOG
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

CONSOLE_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
FILE_FORMAT = "%(asctime)s [%(levelname)-5s] %(threadName)s %(name)s - %(message)s"
SERVER_LOG = "ts_log.log"
# Loggers that have their own files, by file; the flag tells whether they log metrics.
FILES = {
    "access_log.log": (ACCESS_LOG, False),
    "model_log.log": (MODEL_LOG, False),
    "ts_metrics.log": (TS_METRICS, True),
    "model_metrics.log": (MODEL_METRICS, True),
}
FILE_LOGGERS = frozenset(name for name, _ in FILES.values())
METRIC_LOGGERS = frozenset({TS_METRICS, MODEL_METRICS})


def set_up_logging(settings: Settings, notices: Iterable[str] = ()) -> None:
    """Set up logging once for the process.

    Args:
        settings: The settings of the server.
        notices: Warnings about the settings, which are logged.

    Raises:
        SettingError: A file cannot be written, or `log_config` cannot be used.
    """
    logging.addLevelName(logging.WARNING, "WARN")
    config = LogConfig()
    if settings.log_config is not None and is_configured(settings):
        apply_dict_config(settings.log_config)
        root = logging.getLogger()
        log_in_background(list(root.handlers), root.level)
    else:
        if settings.log_config is not None:
            config = read_log_config(settings.log_config)
        log_in_background(_handlers(settings, config))
    # uvicorn would log its start for each address.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_informative)
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
    if config.unsupported:
        logging.getLogger("tsx.server").info(
            "log_config: levels, sizes and numbers of files are used; not %s",
            ", ".join(config.unsupported),
        )
    for notice in notices:
        logging.getLogger("tsx.server").warning("%s", notice)


def _handlers(settings: Settings, config: LogConfig) -> Iterator[logging.Handler]:
    console = logging.StreamHandler(sys.stderr)
    is_json = writes_json(settings.log_format, in_files=settings.log_location is not None)
    console.setFormatter(
        ServerJsonFormatter()
        if is_json
        else (
            ShortFormatter(colour=has_colour(sys.stderr))
            if is_terminal(sys.stderr)
            else TextLogFormatter(CONSOLE_FORMAT)
        )
    )
    raw_stream = getattr(sys.stderr, "buffer", None)
    if is_json and isinstance(raw_stream, LossyOutput):
        raw_stream.report_loss = loss_line
    metrics_directory = settings.metrics_location or settings.log_location
    if metrics_directory is not None:
        # Metrics are not shown on the console, because programs read them from the files.
        console.addFilter(lambda record: record.name not in METRIC_LOGGERS)
    yield console
    formatter = ServerJsonFormatter() if is_json else TextLogFormatter(FILE_FORMAT)
    if settings.log_location is not None:
        yield _file_handler(
            settings.log_location / SERVER_LOG,
            config,
            lambda record: record.name not in FILE_LOGGERS,
            formatter,
        )
    for file, (logger, is_metrics) in FILES.items():
        directory = metrics_directory if is_metrics else settings.log_location
        if directory is not None:
            # Metrics keep TorchServe's format even with JSON, because programs parse it.
            file_formatter = TextLogFormatter(FILE_FORMAT) if is_metrics else formatter
            yield _file_handler(
                directory / file,
                config,
                lambda record, logger=logger: record.name == logger,
                file_formatter,
            )


def _file_handler(
    path: Path, config: LogConfig, filter: object, formatter: logging.Formatter
) -> logging.Handler:
    try:
        handler = LogFile(path.absolute(), config.max_bytes, config.max_files)
    except OSError as error:
        raise SettingError(
            f"log_location, metrics_location: {path} cannot be written: {error.strerror}; name"
            " another directory"
        ) from error
    handler.setFormatter(formatter)
    handler.addFilter(filter)  # type: ignore[arg-type]  # any callable is a filter
    return handler


class TextLogFormatter(logging.Formatter):
    """A formatter with log4j's time format `%d{ISO8601}`.

    Records that are complete lines stay unchanged. Other messages are redacted and escaped, because
    they may contain URLs and text from clients.
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
    """A formatter for a terminal: the time of day, and colour for warnings and errors."""

    _COLOURS: ClassVar = {"warning": "33", "error": "31", "critical": "1;31", "debug": "2"}

    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(message)s")
        self._colour = colour

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        level = level_of(record)
        clock = self.formatTime(record, "%H:%M:%S")
        label = "" if level == "info" else f"{level} "
        if self._colour:
            clock = f"\x1b[2m{clock}\x1b[0m"
            label = (
                f"\x1b[{self._COLOURS[level]}m{label}\x1b[0m" if level in self._COLOURS else label
            )
        return f"{clock} {label}{super().formatMessage(record)}"


class ServerJsonFormatter(JsonLines):
    """A formatter of JSON lines; lines about a version have fields for it and its model."""

    def fields_of(self, record: logging.LogRecord) -> dict[str, object]:
        fields = super().fields_of(record)
        match = VERSION_LABEL.search(record.getMessage())
        return {"model": match[1], "version": match[2], **fields} if match else fields


def _is_informative(record: logging.LogRecord) -> bool:
    """Tell whether a record is not uvicorn's message about invalid HTTP.

    `CasedProtocol.send_400_response` logs the same error with its cause.
    """
    return record.msg != "Invalid HTTP request received."
