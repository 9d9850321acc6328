"""What a run says at its end: a table of what was measured, the winner and why, and where the rest is."""

from __future__ import annotations

from pathlib import Path

from tsx_cli.bench.results import Results, Trial
from tsx_cli.bench.search import best_point
from tsx_cli.bench.verdict import load_in_words
from tsx_cli.output import print_json, print_table


def tell(results: Results, directory: Path, written: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json(results.model_dump(mode="json"))
        return
    rows = [_row(results, at, trial) for at, trial in enumerate(results.trials) if trial.state != "predicted" or trial.accuracy]
    print_table(["", "configuration", "load", "requests/s", "p50 ms", "p99 ms", ""], rows)
    passed = sum(trial.state == "predicted" and trial.accuracy is None for trial in results.trials)
    if passed:
        print(f"{passed} other configurations were not measured: none of them could win, or there was no time left.")
    print(results.why)
    for note in results.notes:
        print(f"note: {note}")
    if written is not None:
        print(written)
    print(f"results: {directory / 'results.json'}")


def _row(results: Results, at: int, trial: Trial) -> list[object]:
    mark = "best" if at == results.winner else "baseline" if at == results.baseline else ""
    if trial.state == "failed":
        return [mark, trial.how(), "", "", "", "", f"failed: {(trial.reason or '').splitlines()[0]}"]
    position = best_point(trial.points)
    if position is None:
        if not trial.points:  # its answers differ, or it was interrupted
            return [mark, trial.how(), "", "", "", "", trial.reason or "not measured"]
        position = min(range(len(trial.points)), key=lambda each: trial.points[each].latency.p99_ms)
    point = trial.points[position]
    told = "" if point.holds else "breaks the bounds" if results.slo and not point.error_rate else "not all answered"
    if trial.accuracy is not None and not trial.accuracy.same:
        told = ", ".join(filter(None, [told, "answers differ"]))
    figures = [f"{point.throughput.value:,.4g}", f"{point.latency.p50_ms:.3g}", f"{point.p99_ms.value:.3g}"]
    return [mark, trial.how(), load_in_words(point.offered), *figures, told]
