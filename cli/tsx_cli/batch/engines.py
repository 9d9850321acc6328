"""Opens the engine that `--on` names."""

from __future__ import annotations

import threading
from pathlib import Path

from tsx_cli.batch.engine import OpenEngine
from tsx_cli.batch.local import open_local
from tsx_cli.batch.readers import InputReader
from tsx_cli.common.failure import CliError, UsageError
from tsx_runtime.settings.schema import Settings

SAGEMAKER = "sagemaker"


def open_engine(
    on: str | None,
    model: Path,
    reader: InputReader,
    settings: Settings,
    stop: threading.Event,
    *,
    workers: int | None,
    batch_size: int | None,
    restart: bool,
    end_job: bool,
) -> OpenEngine:
    """Raises UsageError, CliError, TsxError, ArchiveError."""
    if end_job and on != SAGEMAKER:
        raise UsageError("--stop ends a job of --on sagemaker; a run on this machine or a cluster ends with Ctrl-C")
    if on is None:
        return open_local(model, settings, workers, batch_size)
    if on == SAGEMAKER:
        from tsx_cli.batch.sagemaker.engine import open_sagemaker  # here, as it imports all of tsx deploy

        return open_sagemaker(model, reader, workers, batch_size, stop, restart=restart, end_job=end_job)
    if on != "auto" and ":" not in on:
        raise UsageError(f"--on takes ray://HOST:PORT, HOST:PORT, auto or {SAGEMAKER}, not {on!r}")
    try:
        from tsx_cli.batch.ray.engine import open_ray  # an extra
    except ImportError as error:
        raise CliError(f"--on {on} needs Ray: pip install 'tsx-serve[ray]' ({error})") from error
    return open_ray(on, model, reader, settings, workers, batch_size)
