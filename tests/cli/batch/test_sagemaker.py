"""`tsx batch --on sagemaker`, with moto's control plane and the real container."""

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
from tests.support.platforms.aws import Account, Course
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
    """SageMaker as tests steer it: jobs end when they are created, fail, or wait for `finish`."""

    def __init__(self, course: Course, directory: Path, port: Callable[[], int]) -> None:
        self.directory, self.port, self.jobs = directory, port, list[str]()
        self.fails, self.holds = "", False
        course.after = self._after

    def _after(self, operation: str, event: str) -> None:
        if operation == "sagemaker:CreateTransformJob":
            self.jobs += [name for name in backend().transform_jobs if name not in self.jobs]
            self._set("InProgress")
            if not self.holds:
                self.finish()
        elif operation == "sagemaker:DescribeTransformJob" and self.holds:
            signal.raise_signal(signal.SIGINT)

    def finish(self) -> None:
        self.holds = False
        if not self.fails:
            run_job(self.jobs[-1], self._container)
        self._set("Failed" if self.fails else "Completed")

    def _set(self, status: str) -> None:
        job = backend().transform_jobs[self.jobs[-1]]
        job.transform_job_status, job.failure_reason = status, self.fails

    @contextmanager
    def _container(self, name: str, **environment: str) -> Iterator[Host]:
        model = boto3.client("sagemaker").describe_model(ModelName=name)["PrimaryContainer"]
        directory = self.directory / f"job-{len(self.jobs)}"
        (directory / "model").mkdir(parents=True)
        bucket, _, key = model["ModelDataUrl"].removeprefix("s3://").partition("/")
        boto3.client("s3").download_file(bucket, key, str(directory / "model.tar.gz"))
        with tarfile.open(directory / "model.tar.gz") as packed:
            packed.extractall(directory / "model")
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


def test_a_job_answers_as_this_machine_does_and_the_same_command_finds_it_again(
    archive: Path, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(30)))
    local = batch(archive, "rows.jsonl", "local.jsonl")
    assert b"division by zero" in local
    assert batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker") == local
    assert batch(archive, "rows.jsonl", "again.jsonl", "--on", "sagemaker") == local
    assert len(platform.jobs) == 1
    described = boto3.client("sagemaker").describe_transform_job(TransformJobName=platform.jobs[0])
    assert described["TransformResources"] == {"InstanceType": "ml.c6i.xlarge", "InstanceCount": 1}


def test_files_of_any_bytes_are_answered_and_rows_are_taken_one_by_one(
    archive: Path, platform: Platform
) -> None:
    Path("files").mkdir()
    for number in range(6):
        Path(f"files/{number}.bin").write_bytes(bytes(range(200, 200 + number)))
    reader, taken = InputReader(["files"]), list[Row]()

    def rows() -> Iterator[Row]:
        for row in reader.rows(Position(), 0):
            taken.append(row)
            yield row

    for number, result in enumerate(
        SageMakerEngine(archive, reader, None, None, threading.Event(), restart=False).run(rows())
    ):
        assert len(taken) == number + 1
        body = taken[-1].body
        assert result.body == (body[::-1] if number % 2 else str(number).encode())
        assert result.id == f"{number}.bin"


def test_a_job_that_fails_says_why_and_the_same_command_tries_again(
    archive: Path, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text('{"n": 1}\n')
    platform.fails = "AlgorithmError: no room"
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", code=1)
    assert "AlgorithmError: no room. Its log is in" in capsys.readouterr().err
    platform.fails = ""
    assert json.loads(batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker")) == {
        "id": "rows.jsonl:1",
        "output": {"n": 2},
    }
    assert [name.rpartition("-")[2] for name in platform.jobs] == ["1", "2"]


def test_ctrl_c_leaves_the_job_which_the_same_command_waits_for_or_ends(
    archive: Path,
    platform: Platform,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    platform.holds = True
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", code=130)
    err = capsys.readouterr().err
    assert f"{platform.jobs[0]} is InProgress; 0 of 1 objects are answered" in err
    assert f"{platform.jobs[0]} goes on" in err
    assert "--stop" in err
    ended: list[str] = []
    monkeypatch.setattr(
        SageMakerResponse,
        "stop_transform_job",
        lambda self: ended.append(self.body) or EmptyResult(),
        raising=False,
    )
    platform.holds = False
    assert (
        main(
            ["batch", str(archive), "rows.jsonl", "-o", "far.jsonl", "--on", "sagemaker", "--stop"]
        )
        == 0
    )
    assert json.loads(ended[0]) == {"TransformJobName": platform.jobs[0]}
    platform.finish()
    assert len(batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker").splitlines()) == 2
    assert len(platform.jobs) == 1
    batch(archive, "rows.jsonl", "no.jsonl", "--on", "sagemaker", "--stop", code=1)
    assert "no job of this command is under way" in capsys.readouterr().err


def test_rows_of_the_output_are_not_written_again(
    archive: Path, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(10, 30)))
    expected = batch(archive, "rows.jsonl", "whole.jsonl", "--on", "sagemaker")

    def cut(self: SageMakerEngine, job: str) -> Iterator[RowResult]:
        yield from islice(results(self, job), 12)
        raise CliError("the connection broke")

    results = SageMakerEngine._results
    monkeypatch.setattr(SageMakerEngine, "_results", cut)
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", "--commit-every", "0.01", code=1)
    monkeypatch.setattr(SageMakerEngine, "_results", results)
    assert batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker") == expected
    assert len(platform.jobs) == 1


def test_a_model_that_is_not_deployed_needs_an_image(
    archive: Path, platform: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tsx.toml").unlink()
    Path("rows.jsonl").write_text('{"n": 1}\n')
    batch(archive, "rows.jsonl", "far.jsonl", "--on", "sagemaker", code=2)
    assert "set image and sagemaker.role" in capsys.readouterr().err
    assert main(["batch", str(archive), "-", "-o", "far.jsonl", "--on", "sagemaker"]) == 2
    assert "standard input cannot be read again" in capsys.readouterr().err
