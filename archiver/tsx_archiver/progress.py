"""A progress bar on stderr for large archives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tsx_archiver.writing import Progress


@contextmanager
def progress_bar(title: str, *, shown: bool) -> Iterator[Progress | None]:
    """Show a bar, and yield the `progress` of `write_archive`, or None if no bar is shown."""
    if not shown:
        yield None
        return
    # Importing rich takes longer than writing a small archive.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda member, done, total: bar.update(
            task, description=member, completed=done, total=total
        )
