"""How far a run is, on stderr, and what it has done."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status

from tsx_cli.batch.readers import RowReader
from tsx_cli.batch.run import Tally
from tsx_cli.batch.sources import STDIN
from tsx_cli.common.output import number
from tsx_runtime.shared.log_format import escaped

BETWEEN_LINES = 30.0  # seconds, where stderr is no terminal


class BatchProgress:
    """One line that changes on a terminal; elsewhere a line now and then."""

    def __init__(self, reader: RowReader) -> None:
        self._reader = reader
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._printed = time.monotonic()

    def __enter__(self) -> BatchProgress:
        if self._console.is_terminal:
            self._status = self._console.status("the model loads")
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, tally: Tally) -> None:
        text = progress_text(tally, self._reader.total, exact=self._reader.exact)
        if self._status is not None:
            self._status.update(escaped(text))
        elif time.monotonic() - self._printed >= BETWEEN_LINES:
            self._printed = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def progress_text(tally: Tally, total: int | None, *, exact: bool) -> str:
    """`total` is in the unit of `Position.done`; rows, where that is `exact`."""
    parts = [f"{tally.rows:,} rows"]
    if tally.errors:
        parts.append(f"{tally.errors:,} errors")
    rate = (tally.rows - tally.before) / tally.seconds if tally.seconds else 0.0
    parts.append(f"{number(rate)} rows/s")
    done = tally.position.done
    if total is not None and done:
        left = total - done if exact else round(tally.rows * (total - done) / done)
        parts.append(f"{'' if exact else 'about '}{left:,} left")
        if rate:
            parts.append(f"{timedelta(seconds=round(left / rate))} left")
    return " · ".join(parts)


def summary(tally: Tally, output: str, batch_size: int | None, price_per_hour: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "output": output,
        "finished": tally.finished,
        "rows": tally.rows,
        "errors": tally.errors,
        "rows_before": tally.before,
        "seconds": round(tally.seconds, 3),
        "total_seconds": round(tally.total_seconds, 3),
        "rows_per_second": round((tally.rows - tally.before) / tally.seconds, 3) if tally.seconds else None,
        "batch_size": batch_size,
    }
    if price_per_hour is not None:
        found["cost"] = tally.total_seconds / 3600 * price_per_hour
    return found


def summary_text(found: dict[str, Any]) -> str:
    rate = "" if found["rows_per_second"] is None else f", {number(found['rows_per_second'])} rows/s"
    before = f" ({found['rows_before']:,} of them by earlier runs)" if found["rows_before"] else ""
    text = f"{found['output']}: {found['rows']:,} rows{before}, {found['errors']:,} errors, {found['seconds']:,.1f} s{rate}"
    if found["batch_size"] is not None:
        text += f", batches of {found['batch_size']:,}"
    if "cost" in found:
        text += f", cost {number(found['cost'])}"
    if found["finished"]:
        return text
    return f"{text}\nstopped before the end" + ("" if found["output"] == STDIN else "; the same command goes on there")
