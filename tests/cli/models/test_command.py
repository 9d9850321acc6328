"""The output of `tsx models`; tests/cli/serve uses a real server."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tsx_cli.common.client import RequestFailed, Response
from tsx_cli.common.failure import CliError
from tsx_cli.models import command
from tsx_cli.models.command import (
    _devices,
    _print_progress,
    _print_version,
    _row,
    with_next_command,
)

IDLE = {"gpu": False, "gpuUsage": "N/A", "status": "READY"}
BUSY = "utilization.gpu [%]::0 % utilization.memory [%]::0 % memory.used [MiB]::678 MiB"


def on_gpu(number: int) -> dict[str, object]:
    return {"gpu": True, "gpuUsage": f"gpuId::{number} {BUSY}", "status": "READY"}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], ""),
        ([IDLE], "cpu"),
        ([on_gpu(1), on_gpu(0), on_gpu(1)], "gpu 0, 1"),
        ([{"gpu": True, "gpuUsage": "N/A", "status": "READY"}], "gpu"),
        ([IDLE, on_gpu(0)], "cpu, gpu 0"),
    ],
)
def test_each_device_is_reported_once(workers: list[dict[str, object]], expected: str) -> None:
    assert _devices(workers) == expected


def test_a_model_with_too_few_workers_is_reported() -> None:
    model = {
        "modelName": "m",
        "modelVersion": "1.0",
        "modelUrl": "m.mar",
        "batchSize": 4,
        "minWorkers": 2,
    }
    broken = {**IDLE, "status": "UNLOADING"}
    row = _row({**model, "workers": [IDLE, broken]}, True)
    assert row == ["m", "1.0", "yes", "1 of 2", "cpu", 4, 0, "m.mar"]
    queue = {"pendingRequests": 3}
    row = _row({**model, "workers": [IDLE, IDLE], "jobQueueStatus": queue}, False)
    assert row[3:7] == [2, "cpu", 4, 3]


def test_a_worker_without_a_process_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    # A worker without a process has no process id.
    worker = {
        **IDLE,
        "id": "9000",
        "status": "FAILED",
        "memoryUsage": 0,
        "startTime": "2026-02-08T11:03:20.974Z",
    }
    further = {
        "lastError": "ValueError: no weights",
        "formsPassedOver": ["onnx: it was built for cuda"],
    }
    _print_version({"modelName": "m", "modelVersion": "1.0", "workers": [worker], **further})
    output = capsys.readouterr().out
    assert "FAILED" in output
    assert "onnx: it was built for cuda" in output
    assert output.endswith("ValueError: no weights\n")


def test_measured_figures_are_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"throughput": 10243.173448294972, "p99Ms": 1.23456}
    _print_version({"modelName": "m", "modelVersion": "1.0", "workers": [], "measured": measured})
    lines = [line for line in capsys.readouterr().out.splitlines() if "measured" in line]
    assert [line.split()[-1] for line in lines] == ["10,243", "1.235"]


@pytest.mark.parametrize(
    "result",
    ["registered with 0 initial workers", "the place of version 1.0 with 0 workers"],
)
def test_the_hint_to_add_a_worker_names_the_version(result: str) -> None:
    message = f'Model "m" Version: 2.0 {result}.'
    command = "`tsx models scale m 1 --version 2.0` adds one."
    hint = "Use scale workers API to add workers for the model."
    assert with_next_command(f"{message} {hint}") == f"{message} {command}"
    assert (
        with_next_command("Workers scaled to 2 for model: m") == "Workers scaled to 2 for model: m"
    )


class FailingServer:
    """A server whose every response is one failure."""

    url = "http://server:8081"

    def __init__(self, failure: RequestFailed) -> None:
        self.failure = failure

    def call(self, method: str, path: str) -> Response:
        raise self.failure


@pytest.mark.parametrize(
    ("message", "before", "after"),
    [
        (
            "Given URL file:///m.mar does not match any allowed URL(s). This server has no store",
            "does not take ",
            "This server has no store",
        ),
        (
            "Failed to download archive from: file:///m.mar: it differs",
            "cannot read ",
            "of this machine. Failed to download archive from: file:///m.mar: it differs",
        ),
    ],
)
def test_refused_and_unreadable_files_have_different_hints(
    tmp_path: Path, message: str, before: str, after: str
) -> None:
    server: Any = FailingServer(RequestFailed(404, message, type="ModelNotFoundException"))
    (tmp_path / "m.mar").write_bytes(b"PK\x03\x04")
    with pytest.raises(CliError) as caught:
        command._register(server, str(tmp_path / "m.mar"), as_json=False)
    assert caught.value.message.startswith(f"{server.url} {before}{tmp_path / 'm.mar'}")
    assert after in caught.value.message


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_error_of_a_registered_version_names_the_replace_command(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = RequestFailed(409, "Model version 1.0 is there", type="ConflictStatusException")
    server: Any = FailingServer(failure)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(RequestFailed) as raised:
        command._register(server, "m [1].mar", False, model_name="x")
    assert "`tsx models replace 'm [1].mar' --name x` replaces it" in raised.value.message
    waiting = capsys.readouterr().err
    assert (f"{server.url} loads m [1].mar" in waiting) == is_terminal


def test_progress_shows_changes_of_the_number_of_ready_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PROGRESS_S", 0)
    over = threading.Event()
    answers = [[IDLE], CliError("busy"), [IDLE], [IDLE, IDLE]]

    class Busy:
        def call(self, method: str, path: str) -> Response:
            workers = answers.pop(0)
            if not answers:
                over.set()
            if isinstance(workers, CliError):
                raise workers
            body = json.dumps([{"minWorkers": 500, "workers": workers}])
            return Response.complete(body.encode(), "application/json")

    server: Any = Busy()
    _print_progress(server, "/models/m", over)
    assert capsys.readouterr().err == "workers ready: 1 of 500\nworkers ready: 2 of 500\n"
