"""Recorded requests in files, directories and S3, in the formats of tsx and of SageMaker."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.batch.s3 import S3, is_s3, location
from tsx_cli.monitor.data_capture import CAPTURE_SUFFIX, read_capture
from tsx_runtime.recordings import SUFFIX, NotARecording, Recorded, read

SUFFIXES = (SUFFIX, CAPTURE_SUFFIX)


def read_any(source: str, s3_endpoint: str | None = None) -> Iterator[Recorded]:
    """Yield the requests of a file, of a directory, or of an `s3://` URL of either.

    The requests of local recordings come in the order of their times. All other files are read one
    after the other by the times in their names; of an object in S3, there is one copy at a time.

    Args:
        source: The path or URL.
        s3_endpoint: The address of a service with S3's protocol, if not AWS's.

    Raises:
        NotARecording: There is no such file, or one is in neither format, or is damaged.
        CliError: An object cannot be read.
        OSError: A file cannot be read.
    """
    if is_s3(source):
        yield from _read_objects(source, S3(s3_endpoint))
        return
    path = Path(source)
    if not path.is_dir():
        yield from _read_file(path, path.as_posix())
        return
    captures = sorted((file.as_posix() for file in path.rglob(f"*{CAPTURE_SUFFIX}")), key=_start)
    has_recordings = next(path.rglob(f"*{SUFFIX}"), None) is not None
    if not captures and not has_recordings:
        raise _nothing_in(source)
    if has_recordings:
        yield from read(path)
    for name in captures:
        yield from _read_file(Path(name), name)


def _read_objects(url: str, s3: S3) -> Iterator[Recorded]:
    prefix = url if url.endswith(SUFFIXES) else f"{url.rstrip('/')}/"
    names = (name for name, _, _ in s3.listing(prefix) if name.endswith(SUFFIXES))
    name = None
    for name in sorted(names, key=_start):
        suffix = name[name.rindex(".") :]
        with tempfile.NamedTemporaryFile(suffix=suffix, dir=temporary_directory()) as copy:
            with s3.calls(name) as client:
                client.download_fileobj(**location(name), Fileobj=copy)
            copy.flush()
            try:
                yield from _read_file(Path(copy.name), name)
            except NotARecording as error:
                raise NotARecording(str(error).replace(copy.name, name)) from error
    if name is None:
        raise _nothing_in(url)


def _read_file(path: Path, name: str) -> Iterator[Recorded]:
    """Yield the requests of a file; `name` is its original path or URL."""
    if not name.endswith(CAPTURE_SUFFIX):
        yield from read(path)
        return
    parts = name.split("/")
    # SageMaker's layout is ENDPOINT/VARIANT/yyyy/mm/dd/hh/FILE.
    is_from_endpoint = len(parts) > 6 and all(part.isdigit() for part in parts[-5:-1])
    yield from read_capture(path, *(parts[-7:-5] if is_from_endpoint else ()))


def _start(name: str) -> str:
    """Return the part of a name by which files sort by time."""
    parts = name.split("/")
    return "/".join(parts[-5:] if name.endswith(CAPTURE_SUFFIX) else parts[-1:])


def _nothing_in(source: str) -> NotARecording:
    return NotARecording(f"{source} contains neither a *{SUFFIX} nor a *{CAPTURE_SUFFIX}")
