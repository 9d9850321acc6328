"""The two stores, each with a real database."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import postgres_server
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.sqlite import SqliteStore

_names = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@pytest.fixture
def database(postgres: str) -> str:
    """The URL of an empty one."""
    name = f"jobs{next(_names)}"
    with psycopg.connect(postgres.replace("DATABASE", "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]  # the name is the test's own
    return postgres.replace("DATABASE", name)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], SqlStore]:
    """Makes stores of one file or database."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "jobs.sqlite")
    from tsx_runtime.jobs.postgres import PostgresStore  # here, where its driver is needed

    database = request.getfixturevalue("database")
    return lambda: PostgresStore(database)


@pytest.fixture
def store(make_store: Callable[[], SqlStore]) -> Iterator[SqlStore]:
    """A store that is closed after the test."""
    made = make_store()
    yield made
    asyncio.run(made.close())


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[SqlStore]:
    """As `store`, in `jobs.sqlite`."""
    made = SqliteStore(tmp_path / "jobs.sqlite")
    yield made
    asyncio.run(made.close())
