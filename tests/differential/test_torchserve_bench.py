"""`tsx bench` measures a real TorchServe with the same options as tsx."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest

from tests.differential.conftest import Pair
from tests.differential.pair import Side
from tsx_cli.bench.commands import torchserve_run as run
from tsx_cli.bench.load.results import Results, read_results
from tsx_cli.main import main

SHORT = ("--duration", "0.3s", "--warm-up", "0", "--json")
CASE = """
described:
  eager_mode:
    benchmark_engine: "ab"
    url: "described.mar"
    workers: [1]
    batch_delay: 5
    batch_size: [2]
    input: "input.txt"
    requests: 20
    concurrency: 4
    exec_env: "local"
    processors: ["cpu"]
"""


@pytest.fixture(autouse=True)
def _enter_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input.txt").write_text("some words")
    monkeypatch.chdir(tmp_path)


def measured(side: Side, name: str, *options: str, port: int | None = None) -> Results:
    url = f"http://127.0.0.1:{port or side.inference}"
    assert (
        main(
            [
                *shlex.split(f"bench --against {url} --model echo --input input.txt"),
                *options,
                *SHORT,
                name,
            ]
        )
        == 0
    )
    return read_results(Path(name))


def test_both_servers_are_measured_by_one_command_and_compared(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--connections", "4", "--rounds", "2")
    for side, name in ((pair.theirs, "theirs.json"), (pair.ours, "ours.json")):
        point = measured(side, name, *options).trials[0].points[0]
        assert point.error_rate == 0
        assert point.throughput.value > 0
    capsys.readouterr()
    assert main(["bench", "compare", "theirs.json", "ours.json"]) == 0
    assert "4 connections" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ("--rate", "40"),
        ("--protocol", "invocations", "--connections", "2"),
        ("--protocol", "grpc", "--connections", "2"),
    ],
    ids=["an open loop", "SageMaker's address", "gRPC"],
)
def test_torchserve_supports_the_other_options(pair: Pair, options: tuple[str, ...]) -> None:
    point = (
        measured(
            pair.theirs, "out.json", *options, port=pair.theirs.grpc if "grpc" in options else None
        )
        .trials[0]
        .points[0]
    )
    assert (point.error_rate, point.rounds[0].errors) == (0, {})
    assert point.rounds[0].ok > 0


def test_an_auto_benchmark_file_runs_against_both_with_the_same_columns(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("PILOT_S", 0.3), ("MIN_ROUND_S", 0.3), ("LOG_DELAY_S", 0.7)):
        monkeypatch.setattr(run, name, seconds)
    Path("described.yaml").write_text(CASE)
    rows = []
    for side, output in ((pair.theirs, "theirs"), (pair.ours, "ours")):
        options = (
            "--against",
            f"http://127.0.0.1:{side.inference}",
            "--management",
            f"http://127.0.0.1:{side.management}",
        )
        assert (
            main(
                [
                    "bench",
                    *options,
                    *shlex.split(f"--logs {logs_of(side)} --output {output} described.yaml"),
                ]
            )
            == 0
        )
        rows.append(
            next(
                csv.DictReader(
                    Path(output, "eager_mode_described_w1_b2", "ab_report.csv")
                    .read_text()
                    .splitlines()
                )
            )
        )
    assert list(rows[0]) == list(rows[1])
    for row in rows:
        assert (row["TS failed requests"], row["Batch size"], row["Concurrency"]) == ("0", "2", "4")
        assert (
            min(
                float(row[column])
                for column in (
                    "TS throughput",
                    "TS latency P50",
                    "predict_mean",
                    "worker_thread_mean",
                )
            )
            >= 0
        )
        assert float(row["TS throughput"]) > 0
    assert (
        main(["bench", "compare", "theirs/eager_mode_described", "ours/eager_mode_described"]) == 0
    )


def logs_of(side: Side) -> Path:
    """Return the directory of a server's metric logs."""
    return next(file.parent for file in side.logs.rglob("ts_metrics.log"))
