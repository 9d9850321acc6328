"""Recorded lines of loggers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def lines_of(*names: str) -> Iterator[list[str]]:
    """Collect the lines of these loggers until the context ends."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.extend(record.getMessage().splitlines())  # type: ignore[method-assign]  # the smallest handler
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
