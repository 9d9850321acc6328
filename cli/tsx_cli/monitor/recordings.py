"""Recorded requests in files, directories and S3, in the formats of tsx and of SageMaker."""

from __future__ import annotations

from collections.abc import Iterator

from tsx_cli.batch.s3 import S3, is_s3
from tsx_cli.batch.sources import Source, Sources
from tsx_cli.common.failure import CliError
from tsx_cli.monitor.data_capture import CAPTURE_SUFFIX, read_capture
from tsx_runtime.recordings import SUFFIX, NotARecording, Recorded, read_file

SUFFIXES = (SUFFIX, CAPTURE_SUFFIX)


def read_any(address: str, s3_endpoint: str | None = None) -> Iterator[Recorded]:
    """Yield the requests of a file, of a directory, or of an `s3://` URL of either.

    The files are read one after the other, by the times in their names.

    Args:
        address: The path or URL.
        s3_endpoint: The address of a service with S3's protocol, if not AWS's.

    Raises:
        CliError: There is no such file, or one is in neither format, is damaged or cannot be read.
    """
    if is_s3(address) and not address.endswith(SUFFIXES):
        address = f"{address.rstrip('/')}/"
    sources = Sources([address], None, S3(s3_endpoint))
    files = sorted((file for file in sources if file.url.endswith(SUFFIXES)), key=_start)
    if not files:
        raise CliError(
            f"{address} contains neither a *{SUFFIX} nor a *{CAPTURE_SUFFIX}; name a recording,"
            " SageMaker's data capture, or a directory or prefix with such files"
        )
    for file in files:
        parts = file.url.split("/")
        # SageMaker's layout is ENDPOINT/VARIANT/yyyy/mm/dd/hh/FILE.
        names = parts[-7:-5] if "".join(parts[-5:-1]).isdigit() else ()
        try:
            with sources.open(file) as content:
                if file.url.endswith(SUFFIX):
                    yield from read_file(content, file.url)
                else:
                    yield from read_capture(content, file.url, *names)
        except NotARecording as error:
            raise CliError(str(error)) from error


def _start(file: Source) -> list[str]:
    """Return the parts of a file's address by which files sort by time."""
    parts = file.url.split("/")
    return parts[-5:] if file.url.endswith(CAPTURE_SUFFIX) else parts[-1:]
