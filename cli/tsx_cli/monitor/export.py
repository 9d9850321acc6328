"""`tsx monitor export` writes recorded requests in the format of SageMaker's data capture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import Config, read_settings
from tsx_cli.monitor.data_capture import encode_capture
from tsx_cli.monitor.recordings import read_any
from tsx_runtime.recordings import NotARecording


def export(
    recording: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DIRECTORY|URL", help="A recording, a directory of them, or s3://..."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: a .jsonl.")],
    config: Config = None,
) -> None:
    """Write the requests of a recording for SageMaker Model Monitor.

    Failed requests are left out, because SageMaker captures none.
    """
    settings, _ = read_settings(config)
    written = failed = 0
    try:
        with write_atomically(output, mode=0o600) as file:
            for entry in read_any(recording, settings.s3_endpoint_url):
                if entry.status >= 400:
                    failed += 1
                    continue
                file.write(encode_capture(entry))
                written += 1
    except NotARecording as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"{error.filename or output}: {error.strerror or error}") from error
    print(f"{output}: {written} requests, without {failed} that failed")
