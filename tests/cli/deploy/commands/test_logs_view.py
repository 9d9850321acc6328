"""The log of a deployment, and the diagnosis of a failed one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import boto3
import pytest

from tests.kit.deploy import interrupted_waits
from tests.support.deploying import Deploy
from tests.support.platforms.aws import REGION, Scenario
from tsx_cli.deploy.aws.logs import CloudWatch
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.sagemaker import kinds as sagemaker_kinds

GROUP, STREAM = "/aws/sagemaker/Endpoints/digits", "AllTraffic/i-0"
PING_FAILURE = "The primary container for production variant AllTraffic did not pass the ping health check. Please check CloudWatch logs."


@pytest.fixture
def deploy(deploy_to: Callable[..., Deploy]) -> Deploy:
    return deploy_to("sagemaker")


def write(*lines: str, age_s: float = 0.0) -> None:
    """Write lines into the deployment's log group."""
    client = boto3.client("logs")
    if not client.describe_log_groups(logGroupNamePrefix=GROUP)["logGroups"]:
        client.create_log_group(logGroupName=GROUP)
        client.create_log_stream(logGroupName=GROUP, logStreamName=STREAM)
    timestamp_ms = round((time.time() - age_s) * 1000)
    client.put_log_events(
        logGroupName=GROUP,
        logStreamName=STREAM,
        logEvents=[
            {"timestamp": timestamp_ms + n, "message": line} for n, line in enumerate(lines)
        ],
    )


def test_a_failed_start_shows_the_log_and_its_diagnosis(
    deploy: Deploy, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_endpoint = sagemaker_kinds.SageMakerEndpoint.create
    error = "ModuleNotFoundError: No module named 'cv2'"

    def create(self: sagemaker_kinds.SageMakerEndpoint, cloud: Cloud, resource: object) -> None:
        # `resource` is passed on unchanged.
        create_endpoint(self, cloud, resource)  # type: ignore[arg-type]
        write(*(f"line {n}" for n in range(50)), error, age_s=-1)

    monkeypatch.setattr(sagemaker_kinds.SageMakerEndpoint, "create", create)
    scenario.failure = PING_FAILURE
    write("an earlier start: exec format error", age_s=3600)
    deploy.apply(code=1)
    assert f"The last 40 lines of {GROUP}:\n| line 11\n" in deploy.err
    assert "no module 'cv2'. Add its package" in deploy.err
    assert "exec format error" not in deploy.err
    assert "Created by this run and still there:" in deploy.err
    assert "Likely: The image has no module 'cv2'." in deploy.verb("status")
    status = deploy.read_json("status")
    assert (status["status"], status["log"][-1]) == ("Failed", error)


def test_an_empty_log_is_reported(deploy: Deploy, scenario: Scenario) -> None:
    scenario.failure = PING_FAILURE
    deploy.apply(code=1)
    assert "Nothing answered /ping with 200" in deploy.err
    assert "The container wrote no log line" in deploy.err


def test_lines_are_limited_by_number_and_by_age(deploy: Deploy) -> None:
    def shown_lines(*arguments: str) -> list[str]:
        return [line.split()[-1] for line in deploy.verb("logs", *arguments).splitlines()]

    deploy.verb("logs", code=1)
    assert f"{GROUP} has no lines" in deploy.err
    write("old", age_s=7200)
    write("new", "newest")
    assert shown_lines() == ["old", "new", "newest"]
    assert shown_lines("--lines=1") == ["newest"]
    lines = deploy.verb("logs", "--since=1h --json").splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["new", "newest"]
    deploy.verb("logs", "--since=long", code=2)
    assert "(it is 'long')" in deploy.err


def test_new_lines_are_shown_once_in_order(scenario: Scenario) -> None:
    write("first", age_s=1)
    rounds = iter([["second"], ["third", "fourth"]])
    log = CloudWatch(Cloud(REGION), GROUP, sleep=lambda seconds: write(*next(rounds)))
    lines = log.follow(time.time() - 60)
    assert [next(lines).text for _ in range(4)] == ["first", "second", "third", "fourth"]


def test_ctrl_c_leaves_the_deployment_running_and_explains_how_to_continue(
    deploy: Deploy, scenario: Scenario
) -> None:
    scenario.polls = 3
    with interrupted_waits():
        deploy.apply(code=130)
    assert "about 6 min; Ctrl-C leaves it" in deploy.err
    assert "Run the same command again" in deploy.err
    assert "InService" in deploy.apply()
    assert len(scenario.calls) == 1
