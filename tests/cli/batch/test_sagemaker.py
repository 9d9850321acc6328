"""`tsx batch --on sagemaker` with moto's API and the real container."""

from __future__ import annotations

import json
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.core.responses import EmptyResult
from moto.sagemaker.responses import SageMakerResponse

from tests.support.deploying import IMAGE, ROLE
from tests.support.models import make_model
from tests.support.platforms.aws import Account, Scenario
from tests.support.platforms.sagemaker_host import Host, container
from tests.support.platforms.sagemaker_transform import run_job
from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import Position, Row, RowResult
from tsx_cli.batch.sagemaker.engine import SageMakerEngine
from tsx_cli.common.failure import CliError
from tsx_cli.main import main

HANDLER = """
def handle(data, context):
    return None if data is None else [answer(row["body"]) for row in data]


def answer(body):
    if isinstance(body, dict):
        return {"n": body["n"] * 2} if body["n"] != 7 else 1 / 0
    return bytes(body)[::-1] if len(body) % 2 else str(len(body))
"""
SPEC = f"""
[deploy]
image = "{IMAGE}"

[deploy.sagemaker]
role = "{ROLE}"
"""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("batch") / "double.mar", HANDLER, config="batchSize: 8\n"
    )


class Platform:
    """SageMaker under the control of a test.

    Jobs end when they are created. They fail if `failure` has a reason, and wait for `finish` if
    `is_held` is set.
    """

    def __init__(self, scenario: Scenario, directory: Path, port: Callable[[], int]) -> None:
        self.directory, self.port, self.jobs = directory, port, list[str]()
        self.failure, self.is_held = "", False
        scenario.after = self._after

    def _after(self, operation: str, event: str) -> None:
        if operation == "sagemaker:CreateTransformJob":
            self.jobs += [name for name in backend().transform_jobs if name not in self.jobs]
            self._set("InProgress")
            if not self.is_held:
                self.finish()
        elif operation == "sagemaker:DescribeTransformJob" and self.is_held:
            signal.raise_signal(signal.SIGINT)

    def finish(self) -> None:
        self.is_held = False
        if not self.failure:
            run_job(self.jobs[-1], self._container)
        self._set("Failed" if self.failure else "Completed")

    def _set(self, status: str) -> None:
        job = backend().transform_jobs[self.jobs[-1]]
        job.transform_job_status, job.failure_reason = status, self.failure

    @contextmanager
    def _container(self, name: str, **environment: str) -> Iterator[Host]:
        model = boto3.client("sagemaker").describe_model(ModelName=name)["PrimaryContainer"]
        directory = self.directory / f"job-{len(self.jobs)}"
        (directory / "model").mkdir(parents=True)
        bucket, _, key = model["ModelDataUrl"].removeprefix("s3://").partition("/")
        boto3.client("s3").download_file(bucket, key, str(directory / "model.tar.gz"))
        with tarfile.open(directory / "model.tar.gz") as archive_file:
            archive_file.extractall(directory / "model")
        with container(directory, self.port(), {**model["Environment"], **environment}) as host:
            yield host


def backend() -> Any:
    from moto.sagemaker.models import sagemaker_backends

    return sagemaker_backends["123456789012"]["eu-central-1"]


@pytest.fixture
def platform(
    account: Account,
    short_path: Path,
    free_ports: Callable[[int], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Platform:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SageMakerEngine, "poll", 0.0)
    (tmp_path / "tsx.toml").write_text(SPEC)
    return Platform(account.emptied(), short_path, lambda: free_ports(1)[0])


def batch(archive: Path, source: str, output: str, *options: str, code: int = 0) -> bytes:
    assert main(["batch", str(archive), source, "-o", output, *options]) == code
    return Path(output).read_bytes() if code == 0 else b""


def test_a_job_equals_a_local_run_and_the_same_command_reuses_it(
    archive: Path, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(30)))
    local_output = batch(archive, "rows.jsonl", "local.jsonl")
    assert b"division by zero" in local_output
    assert batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker") == local_output
    assert batch(archive, "rows.jsonl", "again.jsonl", "--on", "sagemaker") == local_output
    assert len(platform.jobs) == 1
    job = boto3.client("sagemaker").describe_transform_job(TransformJobName=platform.jobs[0])
    assert job["TransformResources"] == {"InstanceType": "ml.c6i.xlarge", "InstanceCount": 1}


def test_binary_files_are_answered_and_rows_are_read_one_by_one(
    archive: Path, platform: Platform
) -> None:
    Path("files").mkdir()
    for number in range(6):
        Path(f"files/{number}.bin").write_bytes(bytes(range(200, 200 + number)))
    reader, read_rows = InputReader(["files"]), list[Row]()

    def rows() -> Iterator[Row]:
        for row in reader.rows(Position(), 0):
            read_rows.append(row)
            yield row

    for number, result in enumerate(
        SageMakerEngine(archive, reader, None, None, threading.Event(), restart=False).run(rows())
    ):
        assert len(read_rows) == number + 1
        body = read_rows[-1].body
        assert result.body == (body[::-1] if number % 2 else str(number).encode())
        assert result.id == f"{number}.bin"


def test_a_failed_job_has_a_reason_and_the_same_command_retries_it(
    archive: Path, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text('{"n": 1}\n')
    platform.failure = "AlgorithmError: no room"
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", code=1)
    assert "AlgorithmError: no room. Its log is in" in capsys.readouterr().err
    platform.failure = ""
    assert json.loads(batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker")) == {
        "id": "rows.jsonl:1",
        "output": {"n": 2},
    }
    assert [name.rpartition("-")[2] for name in platform.jobs] == ["1", "2"]


def test_ctrl_c_keeps_the_job_and_the_same_command_waits_or_stops_it(
    archive: Path,
    platform: Platform,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    platform.is_held = True
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", code=130)
    log = capsys.readouterr().err
    assert f"{platform.jobs[0]} is InProgress; 0 of 1 objects are answered" in log
    assert f"{platform.jobs[0]} goes on" in log
    assert "--stop" in log
    stop_requests: list[str] = []
    monkeypatch.setattr(
        SageMakerResponse,
        "stop_transform_job",
        lambda self: stop_requests.append(self.body) or EmptyResult(),
        raising=False,
    )
    platform.is_held = False
    assert (
        main(
            ["batch", str(archive), "rows.jsonl", "-o", "far.jsonl", "--on", "sagemaker", "--stop"]
        )
        == 0
    )
    assert json.loads(stop_requests[0]) == {"TransformJobName": platform.jobs[0]}
    platform.finish()
    assert len(batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker").splitlines()) == 2
    assert len(platform.jobs) == 1
    batch(archive, "rows.jsonl", "no.jsonl", "--on", "sagemaker", "--stop", code=1)
    assert "no job of this command is under way" in capsys.readouterr().err


def test_rows_in_the_output_are_not_written_twice(
    archive: Path, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(10, 30)))
    expected = batch(archive, "rows.jsonl", "whole.jsonl", "--on", "sagemaker")

    def break_off(self: SageMakerEngine, job: str) -> Iterator[RowResult]:
        yield from islice(results(self, job), 12)
        raise CliError("the connection broke")

    results = SageMakerEngine._results
    monkeypatch.setattr(SageMakerEngine, "_results", break_off)
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", "--commit-every", "0.01", code=1)
    monkeypatch.setattr(SageMakerEngine, "_results", results)
    assert batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker") == expected
    assert len(platform.jobs) == 1


def test_a_model_without_a_deployment_needs_an_image(
    archive: Path, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tsx.toml").unlink()
    Path("rows.jsonl").write_text('{"n": 1}\n')
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", code=2)
    assert "set image and sagemaker.role" in capsys.readouterr().err
    assert main(["batch", str(archive), "-", "-o", "far.jsonl", "--on", "sagemaker"]) == 2
    assert "standard input cannot be read again" in capsys.readouterr().err
