"""The choice of a store by its location: a SQLite file, or a PostgreSQL database."""

from __future__ import annotations

from pathlib import Path

from tsx_runtime.errors import SettingError
from tsx_runtime.features.jobs.settings import OFF, JobsSettings
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.settings.fields import POSTGRES, SQLITE


def make_store(settings: JobsSettings, directory: Path | None) -> SqlStore | None:
    """Return the store that `jobs_store` names, else one in `directory`, or None without both.

    Raises:
        SettingError: The store cannot be used.
    """
    location = settings.jobs_store
    if location == OFF:
        return None
    if location is not None and location.startswith(POSTGRES):
        return postgres_store(location)
    if location is not None:
        return SqliteStore(Path(location.removeprefix(SQLITE)), settings.max_jobs_size)
    return (
        None
        if directory is None
        else SqliteStore(directory / "jobs.sqlite", settings.max_jobs_size)
    )


def postgres_store(url: str) -> SqlStore:
    """Return the store in a PostgreSQL database.

    Raises:
        SettingError: The driver is not installed, or the URL is wrong.
    """
    try:
        from tsx_runtime.features.jobs.storage.postgres import (
            PostgresStore,  # an optional dependency
        )
    except ImportError as error:
        raise SettingError(
            "jobs_store is a PostgreSQL URL, which needs the extra postgres: pip install"
            " 'tsx-serve[postgres]'"
        ) from error
    try:
        return PostgresStore(url)
    except PostgresStore.driver_error:  # The error's text may contain the password.
        text = (
            "jobs_store is not a URL of a PostgreSQL database. Write"
            " postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
        raise SettingError(
            f"{text}, with the signs @ / : % of the password percent-encoded."
        ) from None
