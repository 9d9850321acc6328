"""Tokens that a command is given, by themselves or in a file."""

from __future__ import annotations

from pathlib import Path

from tsx_cli.common.failure import CliError, UsageError


def read_token(given: str | None, option: str = "--token") -> str | None:
    """`TOKEN`, or what is in the file of `@FILE`. Raises UsageError, CliError."""
    if given is None:
        return None
    token = given
    if given.startswith("@"):
        try:
            token = Path(given[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise CliError(f"{option}: {given[1:]} cannot be read: {reason}") from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{option}: a token is one word of plain letters, digits and signs; @FILE reads it from a file")
    return token
