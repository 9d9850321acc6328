"""The two stores, each with a real database."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import postgres_server
from tsx_runtime.jobs.service import postgres_store
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.sqlite import SqliteStore

_names = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def database(postgres: str) -> str:
    """Create an empty database and return its URL."""
    name = f"jobs{next(_names)}"
    with psycopg.connect(postgres.replace("DATABASE", "postgres"), autocommit=True) as connection:
        # The name is the test's own.
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    return postgres.replace("DATABASE", name)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], SqlStore]:
    """Return a function that makes stores of one file or database."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "jobs.sqlite")
    database = request.getfixturevalue("database")
    return lambda: postgres_store(database)


@pytest.fixture
def store(make_store: Callable[[], SqlStore]) -> Iterator[SqlStore]:
    """Provide a store that is closed after the test."""
    store = make_store()
    yield store
    asyncio.run(store.close())


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[SqlStore]:
    """Provide a store in `jobs.sqlite` that is closed after the test."""
    store = SqliteStore(tmp_path / "jobs.sqlite")
    yield store
    asyncio.run(store.close())
