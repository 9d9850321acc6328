"""The output as precomputed answers: each in a store of jobs, from which a server answers
`/predictions/MODEL/precomputed/ID`.
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
from tsx_runtime.jobs.service import postgres_store
from tsx_runtime.jobs.sql_store import SqlStore
from tsx_runtime.jobs.sqlite import SqliteStore
from tsx_runtime.jobs.store import PRECOMPUTED, AnswerKey, StoredAnswer
from tsx_runtime.settings.schema import POSTGRES, SQLITE
from tsx_runtime.wire import header_block

PREFIX = "jobs+"  # of an output that is such a store
DEFAULT_EXPIRES = "30d"


class _SharedSqlite(SqliteStore):
    """The file of a server that may run: it stays the owner."""

    def _own(self) -> None:
        pass

    def prepare(self, session: object) -> None:
        pass


class PrecomputedWriter:
    """Replaces the answers of rows that succeeded. A part that comes again replaces its own."""

    def __init__(self, store: SqlStore, model: str, keep: float) -> None:
        """`keep`: seconds."""
        self.fingerprint = f"precomputed {model}"
        self._store, self._model, self._keep = store, model, keep
        self._loop = asyncio.new_event_loop()

    def write(self, part: int, results: Sequence[RowResult]) -> None:
        self._loop.run_until_complete(self._write([each for each in results if each.error is None]))

    def finish(self, parts: int) -> None:
        self._loop.run_until_complete(self._store.close())

    async def _write(self, results: Sequence[RowResult]) -> None:
        """Together, since a store commits together what comes together."""
        expires = time.time() + self._keep
        keys = (AnswerKey(PRECOMPUTED, self._model, each.id) for each in results)
        await asyncio.gather(
            *(
                self._store.put_answer(key, _answer(each, expires))
                for key, each in zip(keys, results, strict=True)
            )
        )


def _answer(result: RowResult, expires: float) -> StoredAnswer:
    headers = (
        [(b"content-type", result.content_type.encode("latin-1", "replace"))]
        if result.content_type
        else []
    )
    return StoredAnswer(result.status, header_block(headers), result.body, expires=expires)


def is_jobs_store(output: str) -> bool:
    return output.startswith(PREFIX)


def open_precomputed(output: str, model: str, expires: str | None) -> tuple[PrecomputedWriter, str]:
    """The writer, and the name beside which its run keeps its journal: the file's, or one in the
    working directory.

    Raises UsageError, SettingError.
    """
    keep = read_option(
        parse_seconds, expires or DEFAULT_EXPIRES, "--expires", "a time such as 12h or 7d"
    )
    named = output.removeprefix(PREFIX)
    if named.startswith(POSTGRES):
        store, place = postgres_store(named), Path("precomputed")
    elif named.startswith(SQLITE) and named != SQLITE:
        place = Path(named.removeprefix(SQLITE))
        store = _SharedSqlite(place)
    else:
        raise UsageError(
            f"-o {output} names no store; it takes jobs+sqlite:///FILE or"
            " jobs+postgresql://USER@HOST/DATABASE"
        )
    return PrecomputedWriter(store, model, keep), f"{place}.{quote(model, safe='')}"
