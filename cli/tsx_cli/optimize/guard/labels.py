"""Labels of --labels FILE, in the order of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tsx_cli.bench.workload.payloads import Payload


def read_labels(file: Path, payloads: Sequence[Payload]) -> list[Any]:
    """One label a payload. Raises CliError, UsageError."""
    raise NotImplementedError
