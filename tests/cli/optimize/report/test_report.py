"""The reports of a run: HTML page, text, table and terminal output."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tsx_cli.bench.load.results import Environment, Inputs, ModelInfo
from tsx_cli.optimize.report import show, write_report
from tsx_cli.optimize.results import FormResult, GuardVerdict, OptimizeResults, SizeFigures

SIZES = [1, 8]


def form(
    name: str, state: Any, ratio: float, loss: float, memory: float = 300.0, reason: str = ""
) -> FormResult:
    guard = GuardVerdict(
        passed=loss < 0.005,
        metric="top1",
        limit="top1>=-0.5%",
        value=1 - loss,
        reference=1.0,
        loss=loss,
        loss_bound=loss + 0.001,
        rows=1200,
        text="",
    )
    low, high = ratio * 0.95, ratio * 1.05
    sizes = [
        SizeFigures(
            batch_size=size,
            median_ms=10 / ratio,
            reference_ms=10.0,
            ratio=ratio,
            low=low,
            high=high,
        )
        for size in SIZES
    ]
    return FormResult(
        name=name,
        label=f"{name} in words",
        state=state,
        guard=guard,
        sizes=sizes,
        reason=reason,
        speedup=ratio,
        speedup_low=low,
        speedup_high=high,
        memory_mib=memory,
        size_mib=12.5,
        load_seconds=1.2,
    )


def results(*, best: str | None = "openvino-int8") -> OptimizeResults:
    reference = FormResult(
        name="reference",
        label="the archive as it is",
        state="kept",
        sizes=form("x", "kept", 1.0, 0.0).sizes,
        memory_mib=400.0,
    )
    forms = [
        form("bf16", "passed", 2.5, 0.0005),
        form("openvino-int8", "kept", 6.0, 0.002, 250.0),
        form("onnx", "slower", 0.9, 0.0, reason="not faster than the reference beyond the noise"),
        form("int8-dynamic", "inaccurate", 4.0, 0.03, reason="top1 loses 3 %"),
        FormResult(
            name="cuda-graphs",
            label="CUDA graphs",
            state="not applicable",
            reason="it runs on cuda, and <this> worker runs on cpu",
        ),
    ]
    return OptimizeResults(
        started="2026-01-01T10:00:00+00:00",
        command="tsx optimize digits.mar --input pictures",
        model=ModelInfo(name="digits", version="1.0", archive="digits.mar"),
        environment=Environment(fingerprint="f", cpu="a CPU", cores=2),
        inputs=Inputs(source="pictures", count=1600, smallest=100, median=110, largest=120),
        calibration_rows=256,
        held_out_rows=1344,
        limit="top1>=-0.5%",
        batch_sizes=SIZES,
        reference=reference,
        forms=forms,
        best=best,
        why="openvino-int8 is 6.00 times as fast as the reference.",
    )


def test_the_report_files_contain_every_form_and_escape_texts(tmp_path: Path) -> None:
    hostile = results()
    hostile.forms[2].reason = "=cmd|' /C calc'!A0"
    write_report(hostile, tmp_path)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    names = ("bf16", "openvino-int8", "onnx", "int8-dynamic", "cuda-graphs")
    for part in (*names, "judged by itself with 95 % confidence"):
        assert part in page
        assert part in text
    assert "&lt;this&gt;" in page
    assert "<this>" not in page
    assert page.count("<svg") == 2
    assert "forms: [openvino-int8]" in page
    assert json.loads((tmp_path / "results.json").read_text())["best"] == "openvino-int8"
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {row["reason"] for row in rows if row["name"] == "onnx"} == {"'=cmd|' /C calc'!A0"}
    assert {(row["name"], row["batch_size"]) for row in rows} >= {
        ("reference", "1"),
        ("bf16", "8"),
        ("cuda-graphs", ""),
    }


def test_the_terminal_shows_a_table_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    show(results())
    output = capsys.readouterr().out
    assert "openvino-int8 (best)" in output
    assert "6.00x [5.70, 6.30]" in output
    assert "+0.20%" in output
    assert "cuda-graphs: not applicable: it runs on cuda" in output
    assert "Best form: openvino-int8 (openvino-int8 in words)" in output


def test_the_reports_say_that_the_model_is_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(results(best=None), tmp_path)
    show(results(best=None))
    assert "The model as it is stays: reference (the archive as it is)" in capsys.readouterr().out
    assert "chosen none" in (tmp_path / "report.html").read_text()


def test_a_run_without_measurements_has_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_results = results(best=None).model_copy(update={"forms": [], "complete": False})
    write_report(empty_results, tmp_path)
    show(empty_results)
    assert "incomplete" in (tmp_path / "report.html").read_text()
    assert "<svg" not in (tmp_path / "report.html").read_text()
