"""An engine that answers rows in this process, and a fast model without torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.models import make_model
from tests.support.platforms.aws import REGION, Account
from tsx_cli.batch.rows import Row, RowResult

DOUBLING_HANDLER = """
import os

def handle(data, context):
    if data is None:
        return None
    if fifo := os.environ.get("ROWS_SEEN"):
        with open(fifo, "ab", buffering=0) as file:
            file.write(b"." * len(data))
    return [answer(row.get("body") or row.get("data")) for row in data]

def answer(body):
    if body == {"x": "exit"}:
        os._exit(7)
    return {"twice": 2 * body["x"]} if isinstance(body, dict) else len(body)
"""


class EchoEngine:
    """An engine that returns each row's body three rows later.

    Rows that `fails` selects fail.
    """

    def __init__(self, fails: Callable[[Row], bool] = lambda row: False) -> None:
        self.fails = fails
        self.answered_count = 0
        self.batch_size: int | None = None

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        waiting_rows: list[Row] = []
        for row in rows:
            waiting_rows.append(row)
            if len(waiting_rows) > 3:
                yield self._answer(waiting_rows.pop(0))
        yield from map(self._answer, waiting_rows)

    def _answer(self, row: Row) -> RowResult:
        if row.error is not None:
            return row.failed(400, row.error)
        self.answered_count += 1
        if self.fails(row):
            return row.failed(500, "it failed")
        return RowResult(row.index, row.id, 200, row.content_type, row.body)


@pytest.fixture(scope="session")
def doubling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model that doubles x, and returns the length of other bodies."""
    return make_model(tmp_path_factory.mktemp("models") / "twice.mar", DOUBLING_HANDLER)


@pytest.fixture
def bucket(account: Account) -> Any:
    """Return a client of S3 with an empty bucket `data`."""
    account.emptied()
    client: Any = boto3.client("s3")
    client.create_bucket(Bucket="data", CreateBucketConfiguration={"LocationConstraint": REGION})
    return client
