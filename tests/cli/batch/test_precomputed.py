"""`tsx batch -o jobs+sqlite:///FILE`: responses by key, while a server uses the same file."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tsx_cli.batch.precomputed import open_precomputed
from tsx_cli.batch.rows import RowResult
from tsx_cli.common.failure import UsageError
from tsx_runtime.features.jobs.storage.sqlite import SqliteStore
from tsx_runtime.features.jobs.storage.store import PRECOMPUTED, AnswerKey, StoredAnswer


def stored_answers(path: Path, *keys: str, model: str = "twice") -> list[StoredAnswer | None]:
    async def read() -> list[StoredAnswer | None]:
        store = SqliteStore(path)
        try:
            return [await store.get_answer(AnswerKey(PRECOMPUTED, model, key)) for key in keys]
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.mark.usefixtures("processes")
def test_each_response_is_stored_under_its_rows_id(
    run: Run, tmp_path: Path, doubling_model: Path
) -> None:
    rows = [{"x": 1, "user": "a"}, {"x": 2, "user": "b/c"}, {"user": "bad"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = shlex.split(
        f"batch {doubling_model} in.jsonl -o jobs+sqlite:///store/jobs.sqlite --id-field user --expires 2d"
    )
    result = run(*command)
    assert result.code == 0, result.err
    first, second, third = stored_answers(tmp_path / "store" / "jobs.sqlite", "a", "b/c", "bad")
    assert first is not None
    assert second is not None
    assert (first.status, json.loads(first.body), json.loads(second.body)) == (
        200,
        {"twice": 2},
        {"twice": 4},
    )
    assert b"content-type: application/json" in first.headers
    assert abs(first.expires - time.time() - 2 * 86_400) < 3600
    assert third is None
    assert [path.name for path in (tmp_path / "store").iterdir() if "tsx-batch" in path.name] == []


def test_a_store_can_be_written_while_a_server_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"

    async def serve() -> StoredAnswer | None:
        server = SqliteStore(path)
        key = AnswerKey(PRECOMPUTED, "m", "k")
        await server.put_answer(key, StoredAnswer(200, b"", b"old", expires=time.time() + 60))
        await server.begin_answer(AnswerKey("idempotency", "", "k"), "", "server", 60)
        await asyncio.to_thread(write)
        try:
            # The batch did not remove the job that the server has started.
            assert (
                await server.begin_answer(AnswerKey("idempotency", "", "k"), "", "two", 60)
                is not None
            )
            return await server.get_answer(key)
        finally:
            await server.close()

    def write() -> None:
        writer, _ = open_precomputed(f"jobs+sqlite:///{path}", "m", None)
        writer.write(
            1,
            [
                RowResult(0, "k", 200, "text/plain", b"new"),
                RowResult(1, "none", 500, "", b"", "it failed"),
            ],
        )
        writer.finish(1)

    responses = asyncio.run(serve())
    assert responses is not None
    assert (responses.body, responses.headers) == (b"new", b"content-type: text/plain\r\n")
    assert stored_answers(path, "none", model="m") == [None]


@pytest.mark.parametrize("output", ["jobs+sqlite:///", "jobs+mysql://host/db", "jobs+jobs.sqlite"])
def test_an_output_that_is_not_a_store_is_refused(output: str) -> None:
    with pytest.raises(UsageError, match="names no store"):
        open_precomputed(output, "m", None)


def test_options_without_effect_are_refused(run: Run, tmp_path: Path, doubling_model: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    assert (
        "leave them out"
        in run("batch", doubling_model, "in.jsonl", "-o", "out.jsonl", "--expires", "1d").err
    )
    assert (
        "--output-format"
        in run(
            "batch", doubling_model, "in.jsonl", "-o", "jobs+sqlite:///a", "--output-format", "csv"
        ).err
    )
    assert (
        "--expires takes"
        in run(
            "batch", doubling_model, "in.jsonl", "-o", "jobs+sqlite:///a", "--expires", "soon"
        ).err
    )
