"""Roles that a service cannot assume: the likely reason is said at once where IAM shows it, else
within a minute.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.deploying import Deploy
from tests.support.platforms.aws import Course
from tests.support.platforms.aws_lambda import TRUST, make_role
from tsx_cli.deploy.aws.iam_policies import SERVICES
from tsx_cli.deploy.commands import locations
from tsx_cli.deploy.engine import engine

pytestmark = pytest.mark.slow

REFUSALS = {  # in the words of the services
    "lambda:CreateFunction": (
        "InvalidParameterValueException",
        "The role defined for the function cannot be assumed by Lambda.",
    ),
    "lambda:UpdateFunctionConfiguration": (
        "InvalidParameterValueException",
        "The role defined for the function cannot be assumed by Lambda.",
    ),
    "sagemaker:CreateModel": (
        "ValidationException",
        "Could not assume role arn:aws:iam::123456789012:role/r. Please ensure that the role exists and allows principal "
        "'sagemaker.amazonaws.com' to assume the role.",
    ),
}


class Clock:
    """Each wait takes five seconds, and something may happen in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happens: Callable[[float], Any] = lambda now: None

    def sleep(self, seconds: float) -> None:
        self.now += 5.0
        self.happens(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        locations, "Engine", partial(engine.Engine, sleep=clock.sleep, clock=lambda: clock.now)
    )
    return clock


@pytest.fixture(params=list(SERVICES))
def deploy(
    request: pytest.FixtureRequest,
    archive: Path,
    course: Course,
    capsys: pytest.CaptureFixture[str],
) -> Deploy:
    make_role("other")
    return Deploy(archive, request.param, capsys)


def role(deploy: Deploy, **statement: Any) -> None:
    made = {
        "Effect": "Allow",
        "Principal": {"Service": SERVICES[deploy.target]},
        "Action": "sts:AssumeRole",
        **statement,
    }
    boto3.client("iam").create_role(
        RoleName="deployed", AssumeRolePolicyDocument=json.dumps({"Statement": [made]})
    )


def refuse(course: Course, until: Callable[[], bool] = lambda: False, denied: str = "") -> None:
    """The services cannot assume the role, until they can; and the deploying identity may not call
    what is denied.
    """

    def before(operation: str, said: str) -> None:
        if operation == denied:
            raise ClientError(
                {"Error": {"Code": "AccessDenied", "Message": "not authorized"}},
                operation.partition(":")[2],
            )
        if operation in REFUSALS and not until():
            code, message = REFUSALS[operation]
            raise ClientError(
                {"Error": {"Code": code, "Message": message}}, operation.partition(":")[2]
            )

    course.before = before


@pytest.mark.parametrize(
    "statement",
    [
        {"Principal": {"Service": ["ec2.amazonaws.com"]}},
        {"Effect": "Deny"},
        {"Action": "sts:TagSession"},
    ],
)
def test_a_role_whose_trust_policy_lacks_the_service_is_diagnosed_at_once(
    deploy: Deploy, course: Course, clock: Clock, statement: dict[str, Any]
) -> None:
    role(deploy, **statement)
    refuse(course)
    deploy.apply(code=1)
    assert clock.now == 0
    assert (
        f"does not allow {SERVICES[deploy.target]} to assume"
        in deploy.err
    )
    assert (
        "aws iam get-role --role-name deployed"
        in deploy.err
    )
    assert (
        f"infra/iam/trust-{deploy.target}.json"
        in deploy.err
    )


@pytest.mark.parametrize(
    ("arn", "reason"),
    [
        (
            "arn:aws:iam::123456789012:role/absent",
            "There is no role absent",
        ),
        (
            "arn:aws:iam::210987654321:role/other",
            "belongs to the account 210987654321",
        ),
    ],
)
def test_a_role_that_there_is_not_is_reported_at_once(
    deploy: Deploy, course: Course, clock: Clock, arn: str, reason: str
) -> None:
    refuse(course)
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
def test_a_role_that_is_never_assumed_is_given_up_within_a_minute(
    deploy: Deploy,
    course: Course,
    clock: Clock,
    statement: dict[str, Any],
    denied: str,
    reason: str,
) -> None:
    role(deploy, **statement)
    refuse(course, denied=denied)
    deploy.apply(code=1)
    assert 60 <= clock.now <= 70
    assert reason.format(SERVICES[deploy.target]) in deploy.err


def test_a_role_that_is_new_is_waited_for(deploy: Deploy, course: Course, clock: Clock) -> None:
    role(deploy)
    refuse(course, until=lambda: clock.now >= 20)
    deploy.apply()
    assert clock.now == 20


def test_a_role_that_a_function_is_to_change_to_is_diagnosed(
    archive: Path, course: Course, clock: Clock, capsys: Any
) -> None:
    make_role()
    deploy = Deploy(archive, "lambda", capsys)
    deploy.apply()
    trust = json.dumps(TRUST).replace("lambda.", "ec2.")
    boto3.client("iam").create_role(RoleName="wrong", AssumeRolePolicyDocument=trust)
    refuse(course)
    deploy.apply("--role", "arn:aws:iam::123456789012:role/wrong", code=1)
    assert (
        "does not allow lambda.amazonaws.com"
        in deploy.err
    )
