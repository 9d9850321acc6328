"""`tsx batch` with real processes, workers and archives."""

from __future__ import annotations

import csv
import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Run
from tests.support import forked
from tsx_cli.common.failure import INTERRUPTED, CliError

KILLS = int(os.environ.get("TSX_BATCH_KILLS", "4"))
FAST_OPTIONS = ("--set", "worker_preload=false", "--batch-size", 4, "--workers", 2)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[int], Path]:
    def rows(count: int) -> Path:
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps({"x": number}) + "\n" for number in range(count))
        )
        return tmp_path / "rows.jsonl"

    return rows


@pytest.mark.slow
def test_a_killed_run_resumes_and_writes_each_row_once(
    tmp_path: Path, doubling_model: Path, rows: Callable[[int], Path], session_cache: Path
) -> None:
    """The handler reports each row, so the kills are spread over the whole run."""
    # There are more rows than can be answered before the last kill.
    count = 100 + 100 * KILLS
    rows(count)
    os.mkfifo(tmp_path / "seen")
    progress_pipe = os.open(tmp_path / "seen", os.O_RDWR)
    arguments = shlex.split(
        f"batch {doubling_model} rows.jsonl -o out.jsonl --commit-every 0.01 --workers 1 --batch-size 2"
    )
    command = [
        sys.executable,
        "-m",
        "tsx_cli",
        *map(str, arguments),
        "--set",
        "worker_preload=false",
    ]
    environ = os.environ | {
        "TSX_CACHE_DIR": str(session_cache),
        "ROWS_SEEN": str(tmp_path / "seen"),
    }
    progress = []
    for attempt in range(KILLS):
        with forked.Popen(
            command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            remaining_rows = random.randint(1, 70)
            while remaining_rows > 0:
                assert select.select([progress_pipe], [], [], 60)[0], process.poll()
                remaining_rows -= len(os.read(progress_pipe, remaining_rows))
            process.send_signal(signal.SIGTERM if attempt == 0 else signal.SIGKILL)
            assert process.wait() == (INTERRUPTED if attempt == 0 else -signal.SIGKILL), (
                process.stderr and process.stderr.read()
            )
        journal = tmp_path / "out.jsonl.tsx-batch" / "journal.json"
        progress.append(json.loads(journal.read_bytes())["rows"] if journal.exists() else 0)
        os.set_blocking(progress_pipe, False)
        while b"." in _read(progress_pipe):
            pass
        os.set_blocking(progress_pipe, True)
    assert progress == sorted(progress)
    assert progress[0] > 0
    result = forked.run([*command, "--json"], cwd=tmp_path, env=environ, capture_output=True)
    assert result.returncode == 0, result.stderr
    os.close(progress_pipe)
    summary = json.loads(result.stdout)
    assert (summary["rows"], summary["rows_before"], summary["errors"]) == (count, progress[-1], 0)
    assert lines(tmp_path / "out.jsonl") == [
        {"id": f"rows.jsonl:{n + 1}", "output": {"twice": 2 * n}} for n in range(count)
    ]
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "out.jsonl", "seen"}


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


@pytest.mark.slow
def test_invalid_rows_and_rows_that_kill_workers_become_error_records(
    run: Run, doubling_model: Path, tmp_path: Path
) -> None:
    values: list[Any] = [{"x": number} for number in range(12)]
    values[3], values[7] = {"x": "exit"}, {"y": 1}
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(value) + "\n" for value in values) + "no json\n"
    )
    result = run(
        "batch",
        doubling_model,
        "rows.jsonl",
        "-o",
        "out.jsonl",
        "--price-per-hour",
        3600,
        "--json",
        *FAST_OPTIONS,
    )
    summary = json.loads(result.out)
    assert (result.code, summary["rows"], summary["errors"], summary["batch_size"]) == (0, 13, 3, 4)
    assert summary["cost"] == pytest.approx(summary["total_seconds"], abs=0.001)
    entries = lines(tmp_path / "out.jsonl")
    error_messages = {
        number: entry["error"]["message"]
        for number, entry in enumerate(entries)
        if "error" in entry
    }
    assert error_messages[3].startswith("Worker died")
    assert "KeyError: 'x'" in error_messages[7]
    assert entries[12]["error"]["status"] == 400
    assert [entry["output"] for entry in entries if "output" in entry] == [
        {"twice": 2 * n} for n in range(12) if n not in error_messages
    ]

    result = run("batch", doubling_model, "rows.jsonl", "-o", "out.jsonl", *FAST_OPTIONS)
    assert (result.code, result.out) == (1, "")
    assert "out.jsonl exists already" in result.err

    result = run(
        "batch",
        doubling_model,
        "rows.jsonl",
        "-o",
        "out.jsonl",
        "--restart",
        "--max-errors",
        "10%",
        *FAST_OPTIONS,
    )
    assert result.code == 1
    assert "more than --max-errors allows" in result.err
    # The old output stays until a new one is complete.
    assert entries == lines(tmp_path / "out.jsonl")

    result = run(
        "batch", doubling_model, "rows.jsonl", "-o", "out.jsonl", "--field", "x", *FAST_OPTIONS
    )
    assert "out.jsonl is unfinished" in result.err
    assert "changed since the run started" in result.err


@pytest.mark.slow
def test_every_output_format_has_the_responses_in_order(
    run: Run, doubling_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    for number in range(40):
        (tmp_path / "in" / "b" / f"{number:02}.txt").write_text("x" * (number + 1))
    names = [f"b/{number:02}.txt" for number in range(40)]
    for output in ("out.csv", "out.parquet", "out/", "-"):
        result = run("batch", doubling_model, "in", "-o", output, "--set", "worker_preload=false")
        assert result.code == 0, result.err
    assert [json.loads(line) for line in result.out.splitlines()] == [
        {"id": name, "output": n} for n, name in enumerate(names, 1)
    ]
    assert "40 rows, 0 errors" in result.err
    assert ", batches of " in result.err
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [(row["id"], row["output"], row["error"]) for row in csv.DictReader(file)] == [
            (name, str(n), "") for n, name in enumerate(names, 1)
        ]
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["id"], row["output"], row["status"]) for row in table] == [
        (name, str(n), 200) for n, name in enumerate(names, 1)
    ]
    for number, name in enumerate(names, 1):
        assert (tmp_path / "out" / f"{name}.json").read_text() == str(number)
    assert len([*(tmp_path / "out").rglob("*.json")]) == 40


@pytest.mark.slow
def test_inputs_and_outputs_may_be_s3_objects(run: Run, doubling_model: Path, bucket: Any) -> None:
    for number in range(3):
        bucket.put_object(Bucket="data", Key=f"in/{number}.txt", Body=b"x" * (number + 1))
    bucket.put_object(Bucket="data", Key="rows.jsonl", Body=b'{"x": 1}\n{"x": 2}\n')
    for options in (
        ["s3://data/in/", "-o", "s3://data/out/"],
        ["s3://data/rows.jsonl", "-o", "s3://data/out.jsonl"],
    ):
        result = run("batch", doubling_model, *options, *FAST_OPTIONS)
        assert result.code == 0, result.err
        # The output exists now.
        assert run("batch", doubling_model, *options, *FAST_OPTIONS).code == 1
    keys = [item["Key"] for item in bucket.list_objects_v2(Bucket="data")["Contents"]]
    assert keys == [
        "in/0.txt",
        "in/1.txt",
        "in/2.txt",
        "out.jsonl",
        "out/0.txt.json",
        "out/1.txt.json",
        "out/2.txt.json",
        "rows.jsonl",
    ]
    body = bucket.get_object(Bucket="data", Key="out.jsonl")["Body"].read()
    assert [json.loads(line) for line in body.splitlines()] == [
        {"id": "rows.jsonl:1", "output": {"twice": 2}},
        {"id": "rows.jsonl:2", "output": {"twice": 4}},
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o out.txt", "ends in none of .jsonl, .ndjson, .csv"),
        ("-o out.jsonl --max-errors many", "--max-errors takes a number of rows"),
        ("-o - --output-format parquet", "standard output (-o -) takes JSON lines or"),
        ("-o rows.jsonl", "-o rows.jsonl is among the inputs"),
        (". -o out.jsonl", "-o out.jsonl is among the inputs"),
        ("-o - --json", "--json prints the summary"),
        ("-o made --output-format jsonl", "-o made is a directory"),
        ("-o out.jsonl --on ray://head", "auto or sagemaker, not 'ray://head'"),
    ],
)
def test_usage_errors_are_reported_with_a_remedy(
    run: Run,
    doubling_model: Path,
    rows: Callable[[int], Path],
    tmp_path: Path,
    options: str,
    message: str,
) -> None:
    rows(1)
    (tmp_path / "made").mkdir()
    result = run("batch", doubling_model, "rows.jsonl", *shlex.split(options))
    assert result.code == 2
    assert message in result.err


def test_inputs_may_be_given_by_an_option_as_in_bench(
    run: Run, doubling_model: Path, rows: Callable[[int], Path]
) -> None:
    rows(1)
    result = run("batch", doubling_model, "--input", "rows.jsonl", "-o", "rows.jsonl")
    assert (result.code, "-o rows.jsonl is among the inputs" in result.err) == (2, True)
    result = run("batch", doubling_model, "-o", "out.jsonl")
    assert (result.code, "`tsx batch MODEL.mar INPUT..." in result.err) == (2, True)


def test_a_directory_with_other_files_is_refused_as_output(
    run: Run, doubling_model: Path, rows: Callable[[int], Path]
) -> None:
    rows(1)
    result = run("batch", doubling_model, "rows.jsonl", "-o", ".")
    assert result.code == 1
    assert "./ is not empty" in result.err


def test_s3_objects_are_read_from_the_configured_endpoint(
    run: Run, doubling_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client(service: str, endpoint_url: str, config: object) -> None:
        raise CliError(f"asked {endpoint_url}")

    monkeypatch.setattr("boto3.client", client)
    result = run(
        *shlex.split(
            f"batch {doubling_model} s3://data/rows.jsonl -o out.jsonl --set "
            "s3_endpoint_url=http://127.0.0.1:9"
        )
    )
    assert "asked http://127.0.0.1:9" in result.err
