"""Log groups of `tsx deploy`: their retention, and their removal by a purge only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import boto3
import pytest

from tests.support.deploying import Deploy, a_spec, actions
from tests.support.platforms.aws_lambda import make_role

GROUPS = {"sagemaker": "/aws/sagemaker/Endpoints/digits", "lambda": "/aws/lambda/digits"}


@pytest.fixture(params=list(GROUPS))
def deploy(request: pytest.FixtureRequest, deploy_to: Callable[..., Deploy]) -> Deploy:
    make_role()
    return deploy_to(request.param)


@pytest.fixture
def group(deploy: Deploy) -> str:
    return GROUPS[deploy.target]


def retentions() -> dict[str, Any]:
    """Return the days that each log group keeps its lines."""
    groups = boto3.client("logs").describe_log_groups()["logGroups"]
    return {group["logGroupName"]: group.get("retentionInDays") for group in groups}


def test_lines_are_kept_for_a_month_or_as_long_as_specified(deploy: Deploy, group: str) -> None:
    deploy.apply()
    assert retentions() == {group: 30}
    out = deploy.apply("--set=log_retention=90")
    assert "RetentionInDays: 30 -> 90" in out
    # The value 0 leaves the group unchanged.
    deploy.apply("--set=log_retention=0")
    assert retentions() == {group: 90}
    deploy.apply("--set=log_retention=31", code=2)
    assert "keeps lines for one of 1, 3, 5, 7" in deploy.err


def test_only_a_log_group_without_an_owner_is_adopted(deploy: Deploy, group: str) -> None:
    client = boto3.client("logs")
    client.create_log_group(logGroupName=group)
    client.create_log_group(logGroupName=f"{group}-more")
    assert actions(deploy.plan(code=2))["LogGroup"] == "update"
    deploy.apply()
    assert retentions() == {group: 30, f"{group}-more": None}
    deploy.verb("destroy", "--yes", "--purge")
    client.create_log_group(logGroupName=group, tags={"tsx:name": "theirs"})
    deploy.apply(code=1)
    assert "it belongs to the deployment 'theirs'" in deploy.err


def test_destroy_keeps_the_log_and_a_later_purge_removes_it(deploy: Deploy, group: str) -> None:
    deploy.apply()
    deploy.verb("destroy", "--yes")
    assert list(retentions()) == [group]
    deploy.verb("destroy", "--yes", "--purge")
    assert retentions() == {}
    deploy.apply("--set=log_retention=0")
    # The platform creates the group.
    boto3.client("logs").create_log_group(logGroupName=group)
    deploy.verb("destroy", "--yes", "--purge")
    assert retentions() == {}


def test_the_log_of_a_foreign_endpoint_is_kept(deploy_to: Callable[..., Deploy]) -> None:
    deploy, group = deploy_to("sagemaker"), GROUPS["sagemaker"]
    deploy.apply("--set=log_retention=0")
    # The upload of the archive stays.
    deploy.verb("destroy", "--yes")
    boto3.client("logs").create_log_group(logGroupName=group)
    out = deploy.verb("destroy", "--yes", "--purge")
    assert "Object" in out
    assert retentions() == {group: None}


def test_the_number_of_days_may_be_text() -> None:
    assert a_spec("lambda", log_retention="365").log_retention == 365
