"""The requests of a command's input as samples, with the model's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import tee
from pathlib import Path
from typing import Any

from tsx_cli.batch.local import LocalEngine
from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import Position, Row
from tsx_cli.batch.s3 import S3
from tsx_cli.batch.sources import BY_SUFFIX
from tsx_cli.common.failure import UsageError
from tsx_cli.monitor.recordings import read_any
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.bodies import cell
from tsx_runtime.recordings import SUFFIX, Recorded

UNANSWERED = 0  # the status of a sample whose answer is not known


def read_samples(address: str, s3_endpoint: str | None) -> Iterator[MonitorSample]:
    """Yield the requests of a recording, or of files as `tsx batch` reads them.

    Raises:
        CliError: They cannot be read.
    """
    path = Path(address)
    if path.suffix == SUFFIX or (path.is_dir() and any(path.rglob(f"*{SUFFIX}"))):
        yield from recorded_samples(address, s3_endpoint)
        return
    for row in InputReader([address], s3=S3(s3_endpoint)).rows(Position(), 0):
        body, error = row.body, (row.error or "").encode()
        if path.suffix.lower() == ".csv" and not error:
            values = {name: cell(text) for name, text in json.loads(body).items()}
            body = json.dumps(values).encode()
        headers, status = {"content-type": row.content_type}, 400 if error else UNANSWERED
        yield MonitorSample("", "", row.id, 0.0, 0.0, status, headers, "", body, error)


def recorded_samples(address: str, s3_endpoint: str | None) -> Iterator[MonitorSample]:
    """Yield the requests of recordings, or of SageMaker's data capture, also in S3.

    Raises:
        CliError: They cannot be read.
    """
    return map(_sample_of, read_any(address, s3_endpoint))


def _sample_of(entry: Recorded) -> MonitorSample:
    headers, answer_headers = (
        {name.lower(): value for name, value in headers}
        for headers in (entry.headers, entry.answer_headers)
    )
    status = UNANSWERED if entry.answer is None and entry.status < 400 else entry.status
    kind, answer = answer_headers.get("content-type", ""), entry.answer or b""
    ids = (entry.model, entry.version, entry.request_id)
    return MonitorSample(*ids, entry.at, entry.seconds, status, headers, kind, entry.body, answer)


def answer_samples(
    engine: LocalEngine, samples: Iterator[tuple[Any, MonitorSample]]
) -> Iterator[tuple[Any, MonitorSample]]:
    """Yield the samples, each with its label, with the answers of a model on this machine."""
    sent, waiting = tee(samples)
    rows = (
        Row(
            index,
            sample.request_id,
            sample.body,
            sample.headers.get("content-type", ""),
            error=sample.answer.decode() if sample.status >= 400 else None,
        )
        for index, (_, sample) in enumerate(sent)
    )
    for (label, sample), result in zip(waiting, engine.run(rows), strict=True):
        answer = result.body if result.error is None else result.error.encode()
        kind = result.content_type
        yield label, sample._replace(status=result.status, answer_type=kind, answer=answer)


def read_labels(path: Path, count: int) -> list[Any]:
    """Read the right answers, one per request: a table, JSON lines, or lines of text.

    Raises:
        UsageError: The file has no labels, or another number of them than `count`.
    """
    try:
        if path.suffix in BY_SUFFIX:
            rows = InputReader([str(path)]).rows(Position(), 0)
            labels = [_label(json.loads(row.body)) for row in rows]
        else:
            labels = path.read_text(encoding="utf-8").splitlines()
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"--labels {path}: a row of a table has the column `label`, or only one ({error!r})"
        ) from error
    if len(labels) != count:
        raise UsageError(
            f"--labels {path} has {len(labels):,} labels, and the input has {count:,} requests;"
            " give one label per request, in the same order"
        )
    return labels


def _label(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return row["label"] if len(row) > 1 else next(iter(row.values()))
