"""`tsx cache`: the cache of unpacked archives and of models' environments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tsx_cli.common.options import AsJson, Config, read_option, read_settings
from tsx_cli.common.output import human, print_result, print_table

if TYPE_CHECKING:
    from tsx_archiver.storage.cache import Cache, CachedFiles

# Other subdirectories of cache_dir belong to the user.
KINDS = ("archives", "downloads", "environments")

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def cache(context: typer.Context, as_json: AsJson = False, config: Config = None) -> None:
    """List what tsx has unpacked and installed for models on this machine."""
    if context.invoked_subcommand is None:
        directory = _cache_directory(config)
        entries = [
            _entry_json(kind, entry)
            for kind, store in _stores(directory)
            for entry in store.listing()
        ]
        print_result({"directory": str(directory), "entries": entries}, as_json, _show)


@app.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(help="Only what was not used for this long: 12h, 7d.")
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Remove what no process uses; it is unpacked or installed again when a model needs it."""
    from tsx_archiver.quantities import parse_seconds

    age = (
        0.0
        if older_than is None
        else read_option(parse_seconds, older_than, "--older-than", "a time such as 12h or 7d")
    )
    directory = _cache_directory(config)
    removed_entries = []
    for kind, store in _stores(directory):
        entries_by_directory = {
            entry.directory: _entry_json(kind, entry) for entry in store.listing()
        }
        removed_entries += [
            entries_by_directory[entry.directory]
            for entry in store.prune(age)
            if entry.directory in entries_by_directory
        ]
    print_result({"directory": str(directory), "removed": removed_entries}, as_json, _show_removed)


def _cache_directory(config: Path | None) -> Path:
    from tsx_archiver import default_cache  # a slow import

    settings, _ = read_settings(config)
    return settings.cache_dir or default_cache()


def _stores(directory: Path) -> Iterator[tuple[str, Cache]]:
    """Yield the kinds of cache that exist in a directory, with their names."""
    from tsx_archiver.storage.cache import Cache

    for kind in KINDS:
        if (directory / kind / "entries").is_dir():
            yield kind, Cache(directory, kind=kind)


def _entry_json(kind: str, entry: CachedFiles) -> dict[str, Any]:
    return {
        "kind": kind.removesuffix("s"),
        "model": _model(entry.directory / "files") if kind == "archives" else None,
        "size": entry.size,
        "used": datetime.fromtimestamp(entry.used, timezone.utc).isoformat(timespec="seconds"),
        "in_use": entry.in_use,
        "directory": str(entry.directory),
    }


def _model(files: Path) -> str | None:
    """Return the name and the version of a model, or None if its files are incomplete."""
    from tsx_archiver import ArchiveError
    from tsx_archiver.inspecting import manifest_of

    try:
        manifest = manifest_of(files)
    except (ArchiveError, OSError):
        return None
    return f"{manifest.model_name} {manifest.version}"


def _show(answer: dict[str, Any]) -> None:
    if not answer["entries"]:
        print(f"nothing is cached in {answer['directory']}")
        return
    rows = [
        (
            entry["kind"],
            entry["model"],
            human(entry["size"]),
            _ago(entry["used"]),
            "yes" if entry["in_use"] else "no",
        )
        for entry in answer["entries"]
    ]
    print_table(["kind", "model", "size", "last used", "in use"], rows)
    unused = sum(entry["size"] for entry in answer["entries"] if not entry["in_use"])
    print(
        f"{human(sum(entry['size'] for entry in answer['entries']))} in {answer['directory']}; `tsx"
        f" cache prune` frees {human(unused)}"
    )


def _show_removed(answer: dict[str, Any]) -> None:
    removed = answer["removed"]
    print(
        f"removed {len(removed)} {'entry' if len(removed) == 1 else 'entries'},"
        f" {human(sum(entry['size'] for entry in removed))}"
    )


def _ago(used: str) -> str:
    seconds = max(0.0, time.time() - datetime.fromisoformat(used).timestamp())
    for unit, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
