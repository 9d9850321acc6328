"""The option --slo: bounds such as `p99<100ms`, `p50<20ms,errors<0.1%`."""

from __future__ import annotations

from tsx_archiver.metadata import slo
from tsx_cli.common.failure import UsageError


def parse_slo(text: str) -> slo.Slo:
    """Raises UsageError."""
    try:
        return slo.parse_slo(text)
    except ValueError as error:
        raise UsageError(f"--slo: {error}") from error
