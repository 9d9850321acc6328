"""The directory of `--emit`, in which only files that tsx wrote are overwritten."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.digest import content_digest
from tsx_cli.common.failure import CliError
from tsx_cli.common.run_directory import write_files
from tsx_cli.deploy.emit.render import EmittedFiles

RECORD_NAME = ".tsx-emitted.json"  # path -> SHA-256 of the written content


def write(emitted: EmittedFiles, directory: Path) -> list[Path]:
    """Write files into a directory, and return their paths.

    Raises:
        CliError: A file that tsx did not write would be overwritten. No file was written.
    """
    if directory.exists() and not directory.is_dir():
        raise CliError(f"{directory} is a file; --emit takes a directory")
    record = _read_record(directory)
    names = [*emitted.files, *emitted.copied]
    foreign_names = [
        name
        for name in names
        if _is_foreign(directory / name, record.get(name), emitted.files.get(name))
    ]
    if foreign_names:
        paths = ", ".join(str(directory / name) for name in foreign_names)
        reason = "would be overwritten, but tsx did not write it or it has changed since"
        raise CliError(f"{paths} {reason}; move it, or give another directory")
    write_files(emitted.files, directory)
    for name, source in emitted.copied.items():
        if not (directory / name).exists() or not (directory / name).samefile(source):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            with (
                source.open("rb") as original,
                write_atomically(directory / name, durable=False) as file,
            ):
                shutil.copyfileobj(original, file)
    digests = {name: _sha256(directory / name) for name in names}
    write_files({RECORD_NAME: json.dumps({**record, **digests}, indent=2) + "\n"}, directory)
    return [directory / name for name in names]


def _read_record(directory: Path) -> dict[str, str]:
    path = directory / RECORD_NAME
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CliError(
            f"{path} cannot be read: {error}; remove it and the files written with it"
        ) from error
    return (
        {str(name): str(sha) for name, sha in content.items()}
        if isinstance(content, Mapping)
        else {}
    )


def _is_foreign(path: Path, recorded_digest: str | None, text: str | None) -> bool:
    if not path.exists():
        return False
    if path.is_dir():
        return True
    digest = _sha256(path)
    return digest != recorded_digest and (
        text is None or digest != hashlib.sha256(text.encode()).hexdigest()
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return content_digest(file)
