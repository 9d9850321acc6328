"""How `tsx models` reads what a server tells (that it asks a real one is in test_serve.py)."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from tsx_cli.common.client import RequestFailed, Response
from tsx_cli.common.failure import CliError
from tsx_cli.models import command
from tsx_cli.models.command import _devices, _print_progress, _print_version, _row, in_commands

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
def test_devices_are_reported_once_each(workers: list[dict[str, object]], expected: str) -> None:
    assert _devices(workers) == expected


def test_a_model_with_fewer_workers_than_it_should_have_says_so() -> None:
    reported = {
        "modelName": "m",
        "modelVersion": "1.0",
        "modelUrl": "m.mar",
        "batchSize": 4,
        "minWorkers": 2,
    }
    broken = {**IDLE, "status": "UNLOADING"}
    assert _row({**reported, "workers": [IDLE, broken]}, True) == [
        "m",
        "1.0",
        "yes",
        "1 of 2",
        "cpu",
        4,
        0,
        "m.mar",
    ]
    assert _row(
        {**reported, "workers": [IDLE, IDLE], "jobQueueStatus": {"pendingRequests": 3}}, False
    )[3:7] == [2, "cpu", 4, 3]


def test_a_worker_without_a_process_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    worker = {
        **IDLE,
        "id": "9000",
        "status": "FAILED",
        "memoryUsage": 0,
        "startTime": "2026-02-08T11:03:20.974Z",
    }  # the server leaves out its pid
    further = {
        "lastError": "ValueError: no weights",
        "formsPassedOver": ["onnx: it was built for cuda"],
    }
    _print_version({"modelName": "m", "modelVersion": "1.0", "workers": [worker], **further})
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert "onnx: it was built for cuda" in shown
    assert shown.endswith("ValueError: no weights\n")


def test_measured_figures_are_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"throughput": 10243.173448294972, "p99Ms": 1.23456}
    _print_version({"modelName": "m", "modelVersion": "1.0", "workers": [], "measured": measured})
    assert [
        line.split()[-1] for line in capsys.readouterr().out.splitlines() if "measured" in line
    ] == ["10,243", "1.235"]


@pytest.mark.parametrize(
    "done",
    ["registered with 0 initial workers", "the place of version 1.0 with 0 workers"],
)
def test_the_command_that_adds_a_worker_names_the_version(done: str) -> None:
    reported = f'Model "m" Version: 2.0 {done}.'
    command = "`tsx models scale m 1 --version 2.0` adds one."
    assert (
        in_commands(f"{reported} Use scale workers API to add workers for the model.")
        == f"{reported} {command}"
    )
    assert in_commands("Workers scaled to 2 for model: m") == "Workers scaled to 2 for model: m"


@pytest.mark.parametrize(
    ("answered", "before", "after"),
    [
        (
            "file:///m.mar does not match",
            "does not take ",
            "This server has no model store",
        ),
        (
            "file:///m.mar: it differs",
            "cannot read ",
            "of this machine. Failed to download",
        ),
    ],
)
def test_a_file_that_the_server_refuses_is_told_from_one_that_it_cannot_read(
    tmp_path: Path, answered: str, before: str, after: str
) -> None:
    class Refusing:
        url = "http://server"

        def call(self, method: str, target: str) -> Response:
            raise RequestFailed(404, answered, type="ModelNotFoundException")

    (tmp_path / "m.mar").write_bytes(b"PK\x03\x04")
    with pytest.raises(CliError) as caught:
        command._register(Refusing(), str(tmp_path / "m.mar"), as_json=False)  # type: ignore[arg-type]  # a server that refuses
    assert caught.value.message.startswith(f"http://server {before}{tmp_path / 'm.mar'}")
    assert caught.value.message.endswith(after)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_version_that_is_registered_already_names_the_command_that_replaces_it(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        url = "http://127.0.0.1:8081"

        def call(self, method: str, path: str) -> Response:
            raise RequestFailed(409, "Model version 1.0 is there", type="ConflictStatusException")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(RequestFailed) as raised:
        command._register(Full(), "m [1].mar", False, model_name="x")  # type: ignore[arg-type]  # a double
    assert raised.value.message.endswith(
        "is there; `tsx models replace 'm [1].mar' --name x` replaces it"
    )
    waiting = capsys.readouterr().err
    assert ("http://127.0.0.1:8081 loads m [1].mar" in waiting) == is_terminal


def test_progress_says_how_many_workers_are_ready_whenever_that_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PROGRESS_S", 0)
    over = threading.Event()
    answers = [[IDLE], CliError("busy"), [IDLE], [IDLE, IDLE]]

    class Busy:
        def call(self, method: str, target: str) -> Response:
            workers = answers.pop(0)
            if not answers:
                over.set()
            if isinstance(workers, CliError):
                raise workers
            return Response.whole(
                json.dumps([{"minWorkers": 500, "workers": workers}]).encode(), "application/json"
            )

    _print_progress(Busy(), "/models/m", over)  # type: ignore[arg-type]  # a server that answers as said
    assert capsys.readouterr().err == "workers ready: 1 of 500\nworkers ready: 2 of 500\n"
