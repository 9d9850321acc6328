"""The forms in an archive: they are added next to the original, and removed, atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_archiver import OpenArchive, rewrite_archive
from tsx_archiver.metadata.forms import FORMS_DIRECTORY, FORMS_FILE, FormIndex
from tsx_archiver.names import normal
from tsx_archiver.opening import MODEL_SUFFIXES
from tsx_archiver.storage.digest import file_digest
from tsx_cli.bench.search.variants import config_name, config_text, with_keys
from tsx_cli.common.failure import CliError
from tsx_cli.common.options import open_cached
from tsx_cli.optimize.builder import BuiltForm, FormBuilder
from tsx_cli.optimize.choose import rank_forms
from tsx_cli.optimize.journal import OptimizeJournal
from tsx_cli.optimize.options import Keep
from tsx_cli.optimize.results import FormResult, OptimizeResults
from tsx_runtime.settings.schema import Settings


def measured_of(result: FormResult) -> dict[str, Any]:
    """Return the figures of a form for the archive; `tsx bench` reads the guard's verdict."""
    return result.model_dump(mode="json", exclude={"name", "state", "reason"}, exclude_none=True)


def keep_forms(path: Path, digest: str, forms: Sequence[BuiltForm], settings: Settings) -> str:
    """Write forms into the archive, replacing those of an earlier run; describe the result.

    Args:
        path: The archive.
        digest: The `digest_of` the archive from which the forms were built.
        forms: The forms in the order in which a server tries them.
        settings: The settings, for the cache and the limits of archives.

    Raises:
        CliError: The archive has changed.
        ArchiveError: The archive cannot be read.
    """
    names = [form.record.name for form in forms]
    with open_cached(path, settings) as archive:
        if digest_of(archive) != digest:
            raise CliError(
                f"nothing was written into {path}: it has changed since its forms were built. Run"
                " tsx optimize again"
            )
        kept_forms = FormIndex(tuple(form.record for form in forms), source_digests(archive))
        config = config_name(archive)
        text = with_keys(config_text(archive), {"forms": names})
    members: dict[str, bytes | Path] = {}
    for form in forms:
        files = sorted(
            file for file in form.directory.rglob("*") if file.is_file() and not file.is_symlink()
        )
        members |= {
            f"{form.record.directory}/{file.relative_to(form.directory).as_posix()}": file
            for file in files
        }
    # These are written last: if the archive is a directory, they must refer to existing files.
    members |= {FORMS_FILE: kept_forms.content(), config: text.encode()}
    rewrite_archive(
        path,
        members,
        remove=[FORMS_DIRECTORY],
        model={"configFile": config},
        limits=settings.archive_limits(),
    )
    return f"{path} now runs as {names[0]}" + (
        f", else as {', '.join(names[1:])}" if names[1:] else ""
    )


def keep_chosen_forms(
    path: Path,
    keep: Keep,
    digest: str,
    results: OptimizeResults,
    builder: FormBuilder,
    journal: OptimizeJournal,
    settings: Settings,
) -> None:
    """Write the forms of --keep into the archive; `digest` is its digest at the start.

    Raises:
        CliError: The archive has changed, or the files of a form are missing.
        ArchiveError: The archive cannot be read.
    """
    chosen_forms = rank_forms(results.forms)[: 1 if keep is Keep.BEST else None]
    if not chosen_forms:
        if builder.archive.config.forms:
            results.notes.append(
                f"{path} still has the forms of an earlier run: tsx optimize"
                f" {path} --remove removes them"
            )
        return
    built_forms: list[BuiltForm] = []
    for form in chosen_forms:
        form_files = builder.find_built(form.name)
        if form_files is None:
            raise CliError(
                f"nothing was written into {path}: {builder.directory / FORMS_DIRECTORY}"
                f" has no files of {form.name}; run tsx optimize again"
            )
        built_forms.append(
            form_files._replace(record=replace(form_files.record, measured=measured_of(form)))
        )
    results.notes.append(keep_forms(path, digest, built_forms, settings))
    for form in chosen_forms:
        form.state = "kept"
    with open_cached(path, settings) as archive:
        journal.written(digest_of(archive))


def remove_forms(path: Path, settings: Settings) -> str:
    """Remove all forms, and their names in model-config.yaml; describe the result.

    Raises:
        CliError: The archive cannot be written.
        ArchiveError: The archive cannot be read.
    """
    with open_cached(path, settings) as archive:
        existing_names = [
            name for name in (FORMS_FILE, FORMS_DIRECTORY) if (archive.directory / name).exists()
        ]
        if not existing_names and "forms" not in archive.config.raw:
            return f"{path} has no forms"
        config = config_name(archive)
        text = with_keys(config_text(archive), {"forms": None})
    changed_members = {config: text.encode()} if "forms" in archive.config.raw else {}
    rewrite_archive(path, changed_members, remove=existing_names, limits=settings.archive_limits())
    return f"{path} has no forms any more; a server runs the original"


def digest_of(archive: OpenArchive) -> str:
    """Return the sha-256 of the archive file, or of a directory's members that forms use."""
    return (
        archive.digest or hashlib.sha256(json.dumps(source_digests(archive)).encode()).hexdigest()
    )


def source_digests(archive: OpenArchive) -> dict[str, str]:
    """Return the sha-256 of each member that forms are built from: weights and code."""
    manifest, handler, digests = archive.manifest, archive.manifest.handler_file, dict[str, str]()
    model_files = {
        normal(name) for name in (manifest.serialized_file, manifest.model_file, handler) if name
    }
    for path in sorted(archive.directory.rglob("*")):
        name = normal(path.relative_to(archive.directory).as_posix())
        first_part, *tail = name.split("/")
        is_hidden = first_part == FORMS_DIRECTORY or any(
            part.startswith(".") for part in (first_part, *tail)
        )
        if (
            not is_hidden
            and (name in model_files or path.suffix in (".py", *MODEL_SUFFIXES))
            and path.is_file()
        ):
            with path.open("rb") as file:
                digests[name] = file_digest(file, path)
    return digests
