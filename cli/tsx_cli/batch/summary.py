"""The progress of a run on stderr, and its summary."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.run import BatchRun
from tsx_cli.batch.sources import STDIN
from tsx_cli.common.output import number
from tsx_cli.common.status_line import StatusLine
from tsx_runtime.shared.log_format import escaped

LINE_INTERVAL_S = 30.0


class BatchProgress(StatusLine):
    """A progress display.

    On a terminal it is a line that changes. Otherwise a line is printed every LINE_INTERVAL_S.
    """

    def __init__(self, reader: InputReader) -> None:
        super().__init__("the model loads")
        self._reader = reader
        self._print_time = time.monotonic()

    def show(self, run: BatchRun) -> None:
        text = progress_text(run, self._reader)
        if self._status is not None:
            self._status.update(escaped(text))
        elif time.monotonic() - self._print_time >= LINE_INTERVAL_S:
            self._print_time = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def progress_text(run: BatchRun, reader: InputReader) -> str:
    done, rate, done_position = run.done, _rate(run), run.done.position.done
    texts = [counted(done.rows, "row")]
    if done.errors:
        texts.append(counted(done.errors, "error"))
    texts.append(f"{number(rate)} rows/s")
    if reader.total is not None and done_position:
        remaining = (
            reader.total - done_position
            if reader.exact
            else round(done.rows * (reader.total - done_position) / done_position)
        )
        texts.append(f"{'' if reader.exact else 'about '}{remaining:,} left")
        if rate:
            texts.append(f"{timedelta(seconds=round(remaining / rate))} left")
    return " · ".join(texts)


def summary(
    run: BatchRun, output: str, batch_size: int | None, price_per_hour: float | None
) -> dict[str, Any]:
    done = run.done
    report: dict[str, Any] = {
        "output": output,
        "finished": done.complete,
        "rows": done.rows,
        "errors": done.errors,
        "first_error": run.first_error or None,
        "rows_before": run.before.rows,
        "seconds": round(run.seconds, 3),
        "total_seconds": round(done.seconds, 3),
        "rows_per_second": round(_rate(run), 3),
        "batch_size": batch_size,
    }
    if price_per_hour is not None:
        report["cost"] = done.seconds / 3600 * price_per_hour
    return report


def summary_text(report: dict[str, Any]) -> str:
    earlier_text = (
        f" ({report['rows_before']:,} of them by earlier runs)" if report["rows_before"] else ""
    )
    text = (
        f"{report['output']}: {counted(report['rows'], 'row')}{earlier_text},"
        f" {counted(report['errors'], 'error')}, {report['seconds']:,.1f} s, "
    )
    text += f"{number(report['rows_per_second'])} rows/s"
    if report["batch_size"] is not None:
        text += f", batches of {report['batch_size']:,}"
    if "cost" in report:
        text += f", cost {number(report['cost'])}"
    if report["first_error"]:
        text += f"\nthe first error: {report['first_error']}"
    if report["finished"]:
        return text
    return f"{text}\nstopped before the end" + (
        "" if report["output"] == STDIN else "; the same command continues there"
    )


def counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _rate(run: BatchRun) -> float:
    return (run.done.rows - run.before.rows) / run.seconds if run.seconds else 0.0
