"""The setting `log_config`: a log4j2.xml (levels, file sizes), or a file for `dictConfig`."""

from __future__ import annotations

import json
import logging
import logging.config
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tsx_archiver import InvalidConfig, load_yaml_file
from tsx_archiver.quantities import parse_bytes
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import Settings

DICT_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
LEVELS = {
    "all": logging.NOTSET,
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "off": logging.CRITICAL + 10,
}
# Python's names for TorchServe's loggers, if they differ. The other names are the same.
RENAMED_LOGGERS = {"org.pytorch.serve": "tsx"}
KNOWN_LOGGERS = frozenset({"tsx", "ACCESS_LOG", "MODEL_LOG", "TS_METRICS", "MODEL_METRICS"})


@dataclass
class LogConfig:
    """The supported settings of a log4j2.xml, with TorchServe's defaults (100 MB, 5 old files)."""

    # Levels by Python's names of the loggers; the root logger has the name "".
    levels: dict[str, int] = field(default_factory=dict)
    max_bytes: int = 100 << 20
    max_files: int = 5
    unsupported: list[str] = field(default_factory=list)  # settings that have no effect


def is_configured(settings: Settings) -> bool:
    """Tell whether `log_config` is a file for `dictConfig`."""
    return settings.log_config is not None and settings.log_config.suffix.lower() in DICT_SUFFIXES


def read_log_config(path: Path) -> LogConfig:
    """Read the levels of loggers and the rotation of files from a log4j2.xml.

    Raises:
        SettingError: The file cannot be read or parsed.
    """
    try:
        root = ElementTree.fromstring(path.read_bytes())
    except OSError as error:
        raise SettingError(f"log_config '{path}' cannot be read: {error.strerror}") from error
    except ElementTree.ParseError as error:
        raise SettingError(
            f"log_config '{path}' is not a log4j2.xml and does not end in"
            f" {', '.join(sorted(DICT_SUFFIXES))}: {error}"
        ) from error
    config = LogConfig()
    for element in root.iter():
        tag = element.tag.rpartition("}")[2].lower()
        if tag in ("root", "logger", "asyncroot", "asynclogger"):
            _read_level(
                config,
                "" if tag.endswith("root") else element.get("name", ""),
                element.get("level", ""),
            )
        elif tag == "sizebasedtriggeringpolicy":
            with suppress(ValueError):
                config.max_bytes = (
                    parse_bytes(element.get("size", ""), kilo=1024) or config.max_bytes
                )
        elif tag == "defaultrolloverstrategy" and element.get("max", "").isdigit():
            config.max_files = int(element.get("max", ""))
        elif tag.endswith("layout") or tag in (
            "socket",
            "syslog",
            "http",
            "kafka",
            "timebasedtriggeringpolicy",
        ):
            name = element.tag.rpartition("}")[2]
            if name not in config.unsupported:
                config.unsupported.append(name)
    return config


def _read_level(config: LogConfig, name: str, level: str) -> None:
    python_name = RENAMED_LOGGERS.get(name, name)
    # Loggers of Java libraries are skipped.
    if level.lower() in LEVELS and (not name or python_name in KNOWN_LOGGERS):
        config.levels[python_name] = LEVELS[level.lower()]


def apply_dict_config(path: Path) -> None:
    """Configure logging by a file for `logging.config.dictConfig`.

    Raises:
        SettingError: The file cannot be read or used.
    """
    try:
        document = (
            json.loads(path.read_bytes())
            if path.suffix.lower() == ".json"
            else load_yaml_file(path)
        )
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False} | document)
    except (OSError, InvalidConfig, ValueError, TypeError, AttributeError, ImportError) as error:
        raise SettingError(f"log_config '{path}' cannot be used: {error}") from error
