"""An engine that answers rows in this process, and fast models without torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.models import make_model
from tests.support.platforms.aws import REGION, Account
from tsx_cli.batch.rows import Row, RowResult

TWICE = """
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
    """An engine that answers with a row's body, some rows behind, or fails as `fails` decides."""

    def __init__(self, fails: Callable[[Row], bool] = lambda row: False) -> None:
        self.fails = fails
        self.seen = 0
        self.batch_size: int | None = None

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        behind: list[Row] = []
        for row in rows:
            behind.append(row)
            if len(behind) > 3:
                yield self._answer(behind.pop(0))
        yield from map(self._answer, behind)

    def _answer(self, row: Row) -> RowResult:
        if row.error is not None:
            return row.failed(400, row.error)
        self.seen += 1
        if self.fails(row):
            return row.failed(500, "it failed")
        return RowResult(row.index, row.id, 200, row.content_type, row.body)


@pytest.fixture(scope="session")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model that doubles x, and returns the length of anything else."""
    return make_model(tmp_path_factory.mktemp("models") / "twice.mar", TWICE)


@pytest.fixture
def bucket(account: Account) -> Any:
    """Return a client of S3 with an empty bucket `data`."""
    account.emptied()
    client: Any = boto3.client("s3")
    client.create_bucket(Bucket="data", CreateBucketConfiguration={"LocationConstraint": REGION})
    return client
