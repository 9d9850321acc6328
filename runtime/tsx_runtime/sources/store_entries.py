"""The files that the settings `load_models` and `load_workflows` name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tsx_runtime.errors import SettingError
from tsx_runtime.sources.urls import is_url


def resolve_entries(
    entries: Sequence[str], store: Path | None, setting: str, is_match: Callable[[Path], bool]
) -> list[tuple[str | None, str, Path | None]]:
    """Return name, file and path of each entry (`[name=]file` or `all`); a URL has no path."""
    if [entry.lower() for entry in entries] == ["all"]:
        store_paths = resolve_file("all", store, setting).parent.iterdir()
        paths = sorted(path for path in store_paths if is_match(path) and path.name[0] != ".")
        return [(None, path.name, path) for path in paths]
    pairs = map(_split_name, entries)
    return [
        (name or None, file, None if is_url(file) else resolve_file(file, store, setting))
        for name, file in pairs
    ]


def resolve_file(file: str, store: Path | None, setting: str) -> Path:
    if store is None and not Path(file).is_absolute():
        raise SettingError(
            f"'{file}' cannot be found, because {setting} is not set: give the archives' directory"
        )
    return Path(file) if store is None else store / file


def _split_name(entry: str) -> tuple[str, str]:
    """Split `[name=]file` into name (possibly empty) and file; a URL may contain `=` too."""
    name, equals, file = entry.partition("=")
    return (name, file) if equals and "/" not in name else ("", entry)
