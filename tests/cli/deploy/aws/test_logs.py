"""The log groups of `tsx deploy`: how long lines are kept, and that the log goes only where that is
asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.deploying import Deploy, a_spec, actions
from tests.support.platforms.aws import Course
from tests.support.platforms.aws_lambda import make_role
from tsx_cli.deploy.aws.logs import GROUPS

pytestmark = pytest.mark.slow


@pytest.fixture(params=list(GROUPS))
def deploy(
    request: pytest.FixtureRequest,
    archive: Path,
    course: Course,
    capsys: pytest.CaptureFixture[str],
) -> Deploy:
    make_role()
    return Deploy(archive, request.param, capsys)


def groups() -> dict[str, Any]:
    return {
        each["logGroupName"]: each.get("retentionInDays")
        for each in boto3.client("logs").describe_log_groups()["logGroups"]
    }


def test_lines_are_kept_for_a_month_or_as_long_as_is_said(deploy: Deploy) -> None:
    name = GROUPS[deploy.target].format("digits")
    deploy.apply()
    assert groups() == {name: 30}
    out = deploy.apply("--set=log_retention=90")
    assert "RetentionInDays: 30 -> 90" in out
    deploy.apply("--set=log_retention=0")  # whatever the group says
    assert groups() == {name: 90}
    deploy.apply("--set=log_retention=31", code=2)
    assert "keeps lines for one of 1, 3, 5, 7" in deploy.err


def test_a_log_group_that_the_platform_made_is_taken_over_and_one_of_another_deployment_is_not(
    deploy: Deploy,
) -> None:
    client, name = boto3.client("logs"), GROUPS[deploy.target].format("digits")
    client.create_log_group(logGroupName=name)
    client.create_log_group(logGroupName=f"{name}-more")
    assert actions(deploy.plan(code=2))["LogGroup"] == "update"
    deploy.apply()
    assert groups() == {name: 30, f"{name}-more": None}
    deploy.verb("destroy", "--yes", "--purge")
    client.create_log_group(logGroupName=name, tags={"tsx:name": "theirs"})
    deploy.apply(code=1)
    assert (
        "it belongs to the deployment 'theirs'" in deploy.err
    )


def test_destroy_keeps_the_log_and_purge_removes_it_also_afterwards(deploy: Deploy) -> None:
    deploy.apply()
    deploy.verb("destroy", "--yes")
    assert list(groups()) == [GROUPS[deploy.target].format("digits")]
    deploy.verb("destroy", "--yes", "--purge")
    assert groups() == {}
    deploy.apply("--set=log_retention=0")
    boto3.client("logs").create_log_group(
        logGroupName=GROUPS[deploy.target].format("digits")
    )  # as the platform does
    deploy.verb("destroy", "--yes", "--purge")
    assert groups() == {}


def test_the_log_of_an_endpoint_that_somebody_else_has_made_is_kept(
    archive: Path, course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy = Deploy(archive, "sagemaker", capsys)
    deploy.apply("--set=log_retention=0")
    deploy.verb("destroy", "--yes")  # what was uploaded for it is still there
    boto3.client("logs").create_log_group(logGroupName=GROUPS["sagemaker"].format("digits"))
    out = deploy.verb("destroy", "--yes", "--purge")
    assert "Object" in out
    assert groups() == {GROUPS["sagemaker"].format("digits"): None}


def test_a_number_of_days_may_be_text_as_of_set() -> None:
    assert a_spec("lambda", log_retention="365").log_retention == 365
