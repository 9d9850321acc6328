"""Foreign texts are logged without terminal control characters."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.server.logging_setup import (
    CONSOLE_FORMAT,
    ShortFormatter,
    TextLogFormatter,
)
from tsx_runtime.shared.log_format import UNSAFE, escaped
from tsx_runtime.worker.diagnostics.printing import WorkerTextFormatter

EVIL = "\x1b[2J\x9b31m\u202egnp"


def record(name: str) -> logging.LogRecord:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        return logging.LogRecord(
            name,
            logging.ERROR,
            "",
            0,
            "it failed: %s",
            (EVIL,),
            (type(error), error, error.__traceback__),
        )


def test_terminal_control_characters_are_escaped() -> None:
    assert escaped(EVIL) == r"\x1b[2J\x9b31m\u202egnp"
    assert escaped("a\r\n\tb é 漢 \U0001f600") == "a\r\n\tb é 漢 \U0001f600"
    assert escaped("50 %\r51 %") == r"50 %\x0d51 %"


@given(st.text())
def test_no_terminal_control_character_remains(text: str) -> None:
    escaped_text = escaped(text).replace("\r\n", "")
    assert not any(
        (ord(letter) < 32 and letter not in "\n\t") or 0x7F <= ord(letter) < 0xA0
        for letter in escaped_text
    )


def test_server_and_worker_logs_cannot_control_a_terminal() -> None:
    for formatter in (
        TextLogFormatter(CONSOLE_FORMAT),
        ShortFormatter(colour=False),
        WorkerTextFormatter(),
    ):
        line = formatter.format(record("tsx.http"))
        assert line.count(r"\x1b[2J\x9b31m\u202egnp") == 2, line
        assert not set(line) & {"\x1b", "\x9b", "\u202e"}


def test_a_handlers_log_cannot_control_a_terminal() -> None:
    assert not UNSAFE.search(WorkerTextFormatter().format(record("own")))
