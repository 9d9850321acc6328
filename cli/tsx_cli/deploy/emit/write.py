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

RECORD = ".tsx-emitted.json"  # path -> SHA-256 of the written content


def write(emitted: EmittedFiles, directory: Path) -> list[Path]:
    """Write files into a directory, and return their paths.

    Raises:
        CliError: A file of somebody else would be overwritten. Nothing was written.
    """
    if directory.exists() and not directory.is_dir():
        raise CliError(f"{directory} is a file; --emit takes a directory")
    record = _record(directory)
    names = [*emitted.files, *emitted.copied]
    strange = [
        name
        for name in names
        if _is_somebody_elses(directory / name, record.get(name), emitted.files.get(name))
    ]
    if strange:
        paths = ", ".join(str(directory / name) for name in strange)
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
    written = {name: _sha256(directory / name) for name in names}
    write_files({RECORD: json.dumps({**record, **written}, indent=2) + "\n"}, directory)
    return [directory / name for name in names]


def _record(directory: Path) -> dict[str, str]:
    path = directory / RECORD
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


def _is_somebody_elses(path: Path, recorded: str | None, text: str | None) -> bool:
    if not path.exists():
        return False
    if path.is_dir():
        return True
    digest = _sha256(path)
    return digest != recorded and (
        text is None or digest != hashlib.sha256(text.encode()).hexdigest()
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return content_digest(file)
