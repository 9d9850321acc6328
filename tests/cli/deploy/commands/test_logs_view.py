"""The log of a deployment, and what is told of one that failed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import boto3
import pytest

from tests.support.models import make_model
from tests.support.platforms.aws import REGION, Course
from tsx_cli.deploy.aws.logs import CloudWatch
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.engine import Engine
from tsx_cli.deploy.sagemaker import kinds as sagemaker_kinds
from tsx_cli.main import main

pytestmark = pytest.mark.slow

GROUP, STREAM = "/aws/sagemaker/Endpoints/m", "AllTraffic/i-0"
NAMED = ["--name", "m", "--target", "sagemaker"]
SAID = [*NAMED, "--role", "arn:aws:iam::123456789012:role/r", "--yes", "--no-check"]
SAID += ["--image", "123456789012.dkr.ecr.eu-central-1.amazonaws.com/tsx@sha256:" + "0" * 64]
PING = "The primary container for production variant AllTraffic did not pass the ping health check. Please check CloudWatch logs."


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return str(make_model(tmp_path / "m.mar", "def handle(data, context):\n    return data\n"))


def write(*lines: str, ago: float = 0.0) -> None:
    client = boto3.client("logs")
    if not client.describe_log_groups(logGroupNamePrefix=GROUP)["logGroups"]:
        client.create_log_group(logGroupName=GROUP)
        client.create_log_stream(logGroupName=GROUP, logStreamName=STREAM)
    at = round((time.time() - ago) * 1000)
    client.put_log_events(
        logGroupName=GROUP,
        logStreamName=STREAM,
        logEvents=[{"timestamp": at + n, "message": line} for n, line in enumerate(lines)],
    )


def test_a_start_that_fails_shows_the_log_and_what_it_tells(
    course: Course,
    archive: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = sagemaker_kinds.SageMakerEndpoint.create

    def create(self: sagemaker_kinds.SageMakerEndpoint, cloud: Cloud, resource: object) -> None:
        real(self, cloud, resource)  # type: ignore[arg-type]  # as it is
        write(
            *(f"line {n}" for n in range(50)), "ModuleNotFoundError: No module named 'cv2'", ago=-1
        )

    monkeypatch.setattr(sagemaker_kinds.SageMakerEndpoint, "create", create)
    course.failure = PING
    write("an earlier start: exec format error", ago=3600)
    assert main(["deploy", archive, *SAID]) == 1
    said = capsys.readouterr().err
    assert f"The last 40 lines of {GROUP}:\n| line 11\n" in said
    assert "no module 'cv2'. Add its package" in said
    assert "exec format error" not in said
    assert (
        "Created by this run and still there:"
        in said
    )
    assert main(["deploy", "status", *NAMED]) == 0
    assert "Likely: The image has no module 'cv2'." in capsys.readouterr().out
    assert main(["deploy", "status", *NAMED, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["status"], reported["log"][-1]) == (
        "Failed",
        "ModuleNotFoundError: No module named 'cv2'",
    )


def test_a_container_that_says_nothing_is_reported(
    course: Course, archive: str, capsys: pytest.CaptureFixture[str]
) -> None:
    course.failure = PING
    assert main(["deploy", archive, *SAID]) == 1
    said = capsys.readouterr().err
    assert (
        "Nothing answered /ping with 200"
        in said
    )
    assert (
        "The container wrote no log line"
        in said
    )


def test_lines_are_shown_by_number_and_by_age(
    course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "logs", *NAMED]) == 1
    assert f"{GROUP} has no lines" in capsys.readouterr().err
    write("old", ago=7200)
    write("new", "newest")
    assert main(["deploy", "logs", *NAMED]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "old",
        "new",
        "newest",
    ]
    assert main(["deploy", "logs", *NAMED, "--lines=1"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["newest"]
    assert main(["deploy", "logs", *NAMED, "--since=1h", "--json"]) == 0
    assert [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()] == [
        "new",
        "newest",
    ]
    assert main(["deploy", "logs", *NAMED, "--since=long"]) == 2
    assert "(it is 'long')" in capsys.readouterr().err


def test_what_comes_is_shown_once_and_in_order(course: Course) -> None:
    write("first", ago=1)
    rounds = iter([["second"], ["third", "fourth"]])
    log = CloudWatch(Cloud(REGION), GROUP, sleep=lambda seconds: write(*next(rounds)))
    lines = log.follow(time.time() - 60)
    assert [next(lines).text for _ in range(4)] == ["first", "second", "third", "fourth"]


def test_ctrl_c_leaves_it_to_aws_and_says_how_to_pick_it_up(
    course: Course,
    archive: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course.looks = 3

    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_wait", interrupted)
        assert main(["deploy", archive, *SAID]) == 130
    said = capsys.readouterr().err
    assert "about 6 min; Ctrl-C leaves it" in said
    assert (
        "Run the same command again"
        in said
    )
    assert main(["deploy", archive, *SAID]) == 0
    assert "InService" in capsys.readouterr().out
    assert len(course.calls) == 1
