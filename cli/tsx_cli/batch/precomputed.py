"""A writer of precomputed responses into a server's store of asynchronous jobs.

A server sends them for `/predictions/MODEL/precomputed/ID`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from tsx_archiver.quantities import parse_seconds
from tsx_cli.batch.rows import RowResult
from tsx_cli.common.failure import UsageError
from tsx_cli.common.options import read_option
from tsx_runtime.features.jobs.storage.location import postgres_store
from tsx_runtime.features.jobs.storage.sql_store import SqlStore
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.features.jobs.storage.store import PRECOMPUTED, AnswerKey, StoredAnswer
from tsx_runtime.settings.fields import POSTGRES, SQLITE
from tsx_runtime.wire import header_block

STORE_PREFIX = "jobs+"
DEFAULT_EXPIRES = "30d"


class _SharedSqlite(SqliteStore):
    """A file of responses that belongs to a server, which may be running."""

    def _lock_file(self) -> None:
        pass

    def prepare(self, session: object) -> None:
        pass


class PrecomputedWriter:
    """A writer of the responses of successful rows. A repeated part replaces its responses."""

    def __init__(self, store: SqlStore, model: str, lifetime_s: float) -> None:
        self.fingerprint = f"precomputed {model}"
        self._store, self._model, self._lifetime_s = store, model, lifetime_s
        self._loop = asyncio.new_event_loop()

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        self._loop.run_until_complete(
            self._write([result for result in results if result.error is None])
        )

    def finish(self, parts: int) -> None:
        self._loop.run_until_complete(self._store.close())

    async def _write(self, results: Sequence[RowResult]) -> None:
        """Write all responses concurrently, so that the store commits them together."""
        expires = time.time() + self._lifetime_s
        keys = (AnswerKey(PRECOMPUTED, self._model, result.id) for result in results)
        await asyncio.gather(
            *(
                self._store.put_answer(key, _stored_answer(result, expires))
                for key, result in zip(keys, results, strict=True)
            )
        )


def _stored_answer(result: RowResult, expires: float) -> StoredAnswer:
    headers = (
        [(b"content-type", result.content_type.encode("latin-1", "replace"))]
        if result.content_type
        else []
    )
    return StoredAnswer(result.status, header_block(headers), result.body, expires=expires)


def open_precomputed(output: str, model: str, expires: str | None) -> tuple[PrecomputedWriter, str]:
    """Return the writer, and a path; the run's journal is stored next to it.

    For SQLite it is the path of the file, for PostgreSQL a path in the working directory.

    Raises:
        UsageError: The output is not the address of a store.
        SettingError: The address of the store is wrong.
    """
    lifetime_s = read_option(
        parse_seconds, expires or DEFAULT_EXPIRES, "--expires", "a time such as 12h or 7d"
    )
    address = output.removeprefix(STORE_PREFIX)
    if address.startswith(POSTGRES):
        store, path = postgres_store(address), Path("precomputed")
    elif address.startswith(SQLITE) and address != SQLITE:
        path = Path(address.removeprefix(SQLITE))
        store = _SharedSqlite(path)
    else:
        raise UsageError(
            f"-o {output} names no store; it takes jobs+sqlite:///FILE or"
            " jobs+postgresql://USER@HOST/DATABASE"
        )
    return PrecomputedWriter(store, model, lifetime_s), f"{path}.{quote(model, safe='')}"
