"""The error of a call to a platform, which the engine reports with what exists by then."""

from __future__ import annotations

from tsx_cli.common.failure import CliError


class CloudError(CliError):
    """The platform refused or failed; `code` is its own name for the reason, if it has one."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
