"""Roles that a service cannot assume: the likely reason, reported at once if IAM shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.deploying import Deploy
from tests.support.platforms.aws import Scenario
from tests.support.platforms.aws_lambda import make_role
from tsx_cli.deploy.aws.iam_policies import SERVICES
from tsx_cli.deploy.engine import engine

UNASSUMABLE = (
    "InvalidParameterValueException",
    "The role defined for the function cannot be assumed by Lambda.",
)
# The error messages of the services.
REFUSALS = {
    "lambda:CreateFunction": UNASSUMABLE,
    "lambda:UpdateFunctionConfiguration": UNASSUMABLE,
    "sagemaker:CreateModel": (
        "ValidationException",
        "Could not assume role arn:aws:iam::123456789012:role/r. Please ensure that the role exists and allows principal "
        "'sagemaker.amazonaws.com' to assume the role.",
    ),
}


class Clock:
    """A clock that each wait advances by five seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        "tsx_cli.deploy.target.Engine",
        partial(engine.Engine, sleep=clock.sleep, clock=lambda: clock.now),
    )
    return clock


@pytest.fixture(params=list(SERVICES))
def deploy(request: pytest.FixtureRequest, deploy_to: Callable[..., Deploy]) -> Deploy:
    make_role("other")
    return deploy_to(request.param)


def create_role(name: str, service: str, **more: Any) -> None:
    """Create a role that a service may assume, unless the statement is changed."""
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": service}}
    policy = json.dumps({"Statement": [statement | more]})
    boto3.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=policy)


def refuse_roles(
    scenario: Scenario, until: Callable[[], bool] = lambda: False, denied: str = ""
) -> None:
    """Let services refuse roles until a condition holds.

    The deploying identity may not call the denied operation.
    """

    def before(operation: str, request: str) -> None:
        name = operation.partition(":")[2]
        if operation == denied:
            error = {"Code": "AccessDenied", "Message": "not authorized"}
            raise ClientError({"Error": error}, name)
        if operation in REFUSALS and not until():
            code, message = REFUSALS[operation]
            raise ClientError({"Error": {"Code": code, "Message": message}}, name)

    scenario.before = before


@pytest.mark.parametrize(
    "statement",
    [
        {"Principal": {"Service": ["ec2.amazonaws.com"]}},
        {"Effect": "Deny"},
        {"Action": "sts:TagSession"},
    ],
)
def test_a_role_whose_trust_policy_lacks_the_service_is_diagnosed_at_once(
    deploy: Deploy, scenario: Scenario, clock: Clock, statement: dict[str, Any]
) -> None:
    create_role("deployed", SERVICES[deploy.target], **statement)
    refuse_roles(scenario)
    deploy.apply(code=1)
    assert clock.now == 0
    assert f"does not allow {SERVICES[deploy.target]} to assume" in deploy.err
    assert "aws iam get-role --role-name deployed" in deploy.err
    assert f"infra/iam/trust-{deploy.target}.json" in deploy.err


@pytest.mark.parametrize(
    ("arn", "reason"),
    [
        ("arn:aws:iam::123456789012:role/absent", "There is no role absent"),
        ("arn:aws:iam::210987654321:role/other", "belongs to the account 210987654321"),
    ],
)
def test_a_role_that_does_not_exist_is_reported_at_once(
    deploy: Deploy, scenario: Scenario, clock: Clock, arn: str, reason: str
) -> None:
    refuse_roles(scenario)
    deploy.apply("--role", arn, code=1)
    assert reason in deploy.err
    assert clock.now == 0


@pytest.mark.parametrize(
    ("statement", "denied", "reason"),
    [
        ({}, "", "names {}: `aws iam get-role"),
        (
            {"Condition": {"StringEquals": {"aws:SourceAccount": "1"}}},
            "",
            "names {}, but its conditions",
        ),
        (
            {},
            "iam:GetRole",
            "could not be checked",
        ),
    ],
)
def test_the_wait_for_an_unassumable_role_ends_after_a_minute(
    deploy: Deploy,
    scenario: Scenario,
    clock: Clock,
    statement: dict[str, Any],
    denied: str,
    reason: str,
) -> None:
    create_role("deployed", SERVICES[deploy.target], **statement)
    refuse_roles(scenario, denied=denied)
    deploy.apply(code=1)
    assert 60 <= clock.now <= 70
    assert reason.format(SERVICES[deploy.target]) in deploy.err


def test_a_deployment_waits_for_a_new_role(
    deploy: Deploy, scenario: Scenario, clock: Clock
) -> None:
    create_role("deployed", SERVICES[deploy.target])
    refuse_roles(scenario, until=lambda: clock.now >= 20)
    deploy.apply()
    assert clock.now == 20


def test_the_new_role_of_a_function_is_diagnosed(
    deploy_to: Callable[..., Deploy], scenario: Scenario, clock: Clock
) -> None:
    make_role()
    deploy = deploy_to("lambda")
    deploy.apply()
    create_role("wrong", "ec2.amazonaws.com")
    refuse_roles(scenario)
    deploy.apply("--role", "arn:aws:iam::123456789012:role/wrong", code=1)
    assert "does not allow lambda.amazonaws.com" in deploy.err
