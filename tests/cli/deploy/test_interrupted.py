"""Failing calls to AWS: running the command again completes the deployment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.deploying import Deploy
from tests.support.platforms.aws import IAM_ACTION_BY_OPERATION, Account, Scenario
from tsx_cli.deploy.engine import engine
from tsx_cli.main import main

# The start time of a canary differs between otherwise equal calls.
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
IAM = Path(__file__).parents[3] / "infra" / "iam"
READ_ACTIONS = ("Describe", "Get", "List", "Head")
QUEUE = "arn:aws:sqs:eu-central-1:123456789012:images"
CANARY = ["--canary=10%", "--bake=0", "--alarm=5xx>0", "--alarm=p95>300ms"]
SHARED = ["--set=sagemaker.component.endpoint=shared", "--set=sagemaker.component.copies=2"]
# Sequences of two specifications that together contain every kind of resource.
LIFECYCLES = {
    "sagemaker component": (
        [*CANARY, *SHARED, "--set=sagemaker.autoscaling.min=0"],
        [*CANARY[:2], *SHARED, "--set=sagemaker.component.memory=4096", "--set=sagemaker.component.max_instances=6"],
    ),
    "sagemaker": (
        [*CANARY, "--create-role", "--set=sagemaker.autoscaling.max=3"],
        [*CANARY[:2], "--create-role", "--set=sagemaker.instances=2"],
    ),
    "lambda": (
        [*CANARY, "--create-role", f"--set=lambda.queue.arn={QUEUE}", "--set=lambda.autoscaling.max=3", "--set=lambda.url=public",
         "--set=lambda.reserved=5"],
        [*CANARY, "--create-role", f"--set=lambda.queue.arn={QUEUE}", "--set=lambda.queue.batch_size=5",
         "--set=lambda.provisioned=2", "--set=env.A=1"],
    ),
}  # fmt: skip


@pytest.fixture
def scenario(account: Account, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setattr(
        "tsx_cli.deploy.target.Engine", partial(engine.Engine, sleep=lambda seconds: None)
    )
    return empty(account)


def empty(account: Account) -> Scenario:
    """Empty AWS, but for a queue."""
    scenario = account.emptied()
    boto3.client("sqs").create_queue(QueueName="images")
    return scenario


class Breaking:
    """Run a command until it succeeds, while each changing call fails once.

    Every other failing call is carried out, and only its response is lost.
    """

    def __init__(self, scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
        self.scenario, self.capsys = scenario, capsys
        # The number of failed calls by command.
        self.counts: list[int] = []

    def __call__(self, command: list[str]) -> None:
        failed: set[str] = set()

        def fail(parity: int, operation: str, request: str) -> None:
            call = TIME.sub("", request)
            is_read = operation.split(":")[1].startswith(READ_ACTIONS)
            if not is_read and call not in failed and len(failed) % 2 == parity:
                failed.add(call)
                error = {"Code": "InternalFailure", "Message": "broken off"}
                raise ClientError({"Error": error}, operation)

        self.scenario.before, self.scenario.after = partial(fail, 0), partial(fail, 1)
        while main(["deploy", *command]) != 0:
            out, err = self.capsys.readouterr()
            # The deployment was destroyed, and only the last response was lost.
            if command[0] == "destroy" and "there is no deployment 'digits'" in err:
                break
            assert "broken off" in err, out + err
            assert "to continue" in err
            assert len(failed) < 60
        self.scenario.before = self.scenario.after = lambda operation, request: None
        self.counts.append(len(failed))


def once(command: list[str]) -> None:
    assert main(["deploy", *command]) == 0


def run_lifecycle(deploy: Deploy, kind: str, run: Callable[[list[str]], Any]) -> list[Any]:
    """Create, change, roll back and remove a deployment, and return its status after each."""
    first, second = LIFECYCLES[kind]
    statuses = []
    verb = ["--name", "digits", "--target", deploy.target, "--yes"]
    for arguments in (first, second, ["rollback", *verb, "--version=1"]):
        run(
            arguments
            if arguments[0] == "rollback"
            else [*deploy.wish(*arguments), "--yes", "--no-check"]
        )
        deploy.capsys.readouterr()
        statuses.append(deploy.read_json("status"))
        if arguments is second:
            deploy.plan(*arguments, code=0)
    run(["destroy", *verb, "--purge"])
    deploy.capsys.readouterr()
    deploy.verb("status", code=1)
    return [_without_urls(status) for status in statuses]


def _without_urls(status: Any) -> Any:
    """Leave out the URLs, which differ between deployments."""
    return json.loads(
        json.dumps(status),
        object_hook=lambda part: {key: value for key, value in part.items() if key != "url"},
    )


@pytest.mark.parametrize("kind", list(LIFECYCLES))
def test_a_failed_call_is_repeated_by_the_next_run(
    kind: str,
    archive: Path,
    scenario: Scenario,
    account: Account,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    deploy = Deploy(archive, kind.split()[0], capsys)
    expected = run_lifecycle(deploy, kind, once)
    _is_allowed("deployer", deploy.target, scenario, 30)
    scenario = empty(account)
    breaking = Breaking(scenario, capsys)
    assert run_lifecycle(deploy, kind, breaking) == expected
    assert min(breaking.counts) >= 1
    assert sum(breaking.counts) > 20
    assert not boto3.client("iam").list_roles()["Roles"]


@pytest.mark.parametrize("kind", list(LIFECYCLES))
def test_a_plan_needs_only_the_planner_policy(
    kind: str, archive: Path, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy, arguments = Deploy(archive, kind.split()[0], capsys), LIFECYCLES[kind][0]
    deploy.apply(*arguments)
    scenario.operations.clear()
    deploy.plan(*arguments, code=0)
    _is_allowed("planner", deploy.target, scenario, 10)


def _is_allowed(role: str, target: str, scenario: Scenario, minimum: int) -> None:
    """Check that a policy in infra/iam allows each call that was made."""
    policy = json.loads((IAM / f"{role}-{target}.json").read_text())
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    required_actions = {
        IAM_ACTION_BY_OPERATION.get(operation, operation.replace("monitoring:", "cloudwatch:"))
        for operation in scenario.operations
    }
    assert required_actions <= allowed, required_actions - allowed
    assert len(required_actions) > minimum
