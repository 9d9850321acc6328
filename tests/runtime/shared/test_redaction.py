"""URLs are logged without their credentials."""

from __future__ import annotations

import logging

import pytest

from tsx_runtime.server.logging_setup import CONSOLE_FORMAT, TextLogFormatter
from tsx_runtime.shared.log_format import JsonLines
from tsx_runtime.shared.redaction import redacted

PRESIGNED = "https://b.s3.amazonaws.com/m.mar?X-Amz-Algorithm=AWS4&X-Amz-Credential=AKIASECRET%2F20&X-Amz-Signature=SECRET&X-Amz-Security-Token=SECRET"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("POST /p?token=SECRET&size=3 HTTP/1.1", "POST /p?token=***&size=3 HTTP/1.1"),
        ("/p?a=1&api_key=SECRET&b", "/p?a=1&api_key=***&b"),
        *(
            (f"/p?{name}=SECRET", f"/p?{name}=***")
            for name in ("key", "sig", "signature", "password", "access_token", "apikey", "Token")
        ),
        *(
            (f"/p?{name}=SECRET", f"/p?{name}=***")
            for name in ("%74oken", "pass%77ord", "%2574oken", "X-Amz-Security-Token", "user-token")
        ),
        ("http://SECRET:SECRET@proxy:3128/", "http://***@proxy:3128/"),
        ("s3://SECRET@SECRET@host/x and ftp://SECRET@b", "s3://***@host/x and ftp://***@b"),
        ("/p?size=3&keyboard=us&author", "/p?size=3&keyboard=us&author"),
        ("mail a@b.c, x=1, http://host/a?b=c@d", "mail a@b.c, x=1, http://host/a?b=c@d"),
    ],
)
def test_secrets_in_urls_are_redacted(text: str, expected: str) -> None:
    assert redacted(text) == expected


@pytest.mark.parametrize("formatter", [TextLogFormatter(CONSOLE_FORMAT), JsonLines()])
def test_log_lines_contain_no_url_secrets(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(PRESIGNED)
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    line = formatter.format(
        logging.LogRecord(
            "tsx.sources", logging.WARNING, "", 0, "%s failed", (PRESIGNED,), exc_info
        )
    )
    assert "SECRET" not in line
    assert "X-Amz-Signature=***" in line
