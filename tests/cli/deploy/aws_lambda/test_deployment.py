"""`tsx deploy` to Lambda with moto: plans, changes, canaries, rollbacks, failures and removal."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.kit.deploy import alarms, scalable_targets
from tests.support.deploying import IMAGE, OTHER_IMAGE, ROLE, Deploy, actions
from tests.support.platforms.aws import Scenario
from tests.support.platforms.aws_lambda import make_role
from tsx_cli.deploy.aws_lambda import kinds as lambda_kinds
from tsx_cli.deploy.engine import engine

QUEUE = "arn:aws:sqs:eu-central-1:123456789012:images"
CANARY = "--canary=20% --bake=10m --alarm=5xx>0 --alarm=p95>300ms"
NEW_VERSION = "--set=lambda.memory=2048"


@pytest.fixture
def deploy(deploy_to: Callable[..., Deploy]) -> Deploy:
    make_role()
    return deploy_to("lambda")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lambda_kinds, "now", lambda: clock.now)
    monkeypatch.setattr("tsx_cli.deploy.target.Engine", partial(engine.Engine, sleep=clock.sleep))
    return clock


class Clock:
    """A clock that advances by a minute at each wait, and then calls `on_wait`."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 21, tzinfo=timezone.utc)
        self.waits = 0
        self.on_wait: Any = lambda waits: None

    def sleep(self, seconds: float) -> None:
        self.now += timedelta(minutes=1)
        self.waits += 1
        self.on_wait(self.waits)


def alias() -> tuple[str, dict[str, float]]:
    """Return the version of the alias, and the weights of other versions."""
    description = boto3.client("lambda").get_alias(FunctionName="digits", Name="live")
    return (
        description["FunctionVersion"],
        description.get("RoutingConfig", {}).get("AdditionalVersionWeights", {}),
    )


def interrupt_canary(waits: int) -> None:
    if alias()[1]:
        raise KeyboardInterrupt


def test_a_function_is_planned_created_and_then_unchanged(
    deploy: Deploy, scenario: Scenario
) -> None:
    scenario.polls = 2
    assert set(actions(deploy.plan(code=2)).values()) == {"create"}
    out = deploy.apply()
    assert "lambda-url" in out
    assert "Function digits: created" in deploy.err
    deploy.plan(code=0)
    publish_count = scenario.operations.count("lambda:PublishVersion")
    deploy.apply()
    assert scenario.operations.count("lambda:PublishVersion") == publish_count == 1
    function = boto3.client("lambda").get_function(FunctionName="digits", Qualifier="live")
    assert function["Code"]["ImageUri"] == IMAGE
    settings = function["Configuration"]
    assert (settings["MemorySize"], settings["Timeout"]) == (3008, 60)


def test_a_change_creates_a_version_and_keeps_the_former(
    deploy: Deploy, scenario: Scenario
) -> None:
    deploy.apply("--set=env.A=1")
    scenario.polls = 1
    arguments = ("--image", OTHER_IMAGE, "--set=lambda.memory=4096")
    assert actions(deploy.plan(*arguments, code=2)) == {
        "LogGroup": "same",
        "Function": "update",
        "Version": "create",
        "Alias": "update",
        "Url": "same",
    }
    assert "MemorySize: 3008 -> 4096" in deploy.apply(*arguments)
    assert alias() == ("2", {})
    get = partial(boto3.client("lambda").get_function, FunctionName="digits")
    assert get(Qualifier="1")["Code"]["ImageUri"] == IMAGE
    second = get(Qualifier="2")
    assert second["Code"]["ImageUri"] == OTHER_IMAGE
    # A variable that is no longer specified is removed.
    assert "Environment" not in second["Configuration"]
    deploy.plan(*arguments, code=0)


def test_a_rollback_reuses_the_earlier_version(
    deploy: Deploy,
) -> None:
    deploy.apply()
    deploy.apply("--set=lambda.timeout=90s")
    assert deploy.versions == [(1, False), (2, True)]
    assert {version["tags"]["tsx:model"] for version in deploy.read_json("history")} == {
        "digits/1.0"
    }
    deploy.verb("rollback", "--yes")
    assert alias()[0] == "1"
    deploy.verb("rollback", "--yes", code=1)
    assert "has no earlier version" in deploy.err
    deploy.apply("--set=lambda.timeout=90s")
    assert alias()[0] == "2"
    assert len(deploy.versions) == 2


@pytest.mark.nightly
def test_only_the_latest_versions_are_kept_and_numbers_are_not_reused(
    deploy: Deploy,
) -> None:
    for memory in (1024, 2048, 3072, 4096):
        deploy.apply(f"--set=lambda.memory={memory} --set=keep=2")
    assert [number for number, _ in deploy.versions] == [3, 4]
    arguments = "--set=lambda.memory=4096 --set=lambda.timeout=90 --set=keep=1"
    deploy.apply(arguments)
    deploy.plan(arguments, code=0)


@pytest.mark.nightly
def test_a_canary_gets_its_share_of_requests_until_it_has_baked(
    deploy: Deploy, clock: Clock
) -> None:
    deploy.apply(CANARY)
    # The first version shares its requests with no other.
    assert alias() == ("1", {})
    weights: list[dict[str, float]] = []
    clock.on_wait = lambda waits: weights.append(alias()[1])
    deploy.apply(CANARY, NEW_VERSION)
    shares = [share for share in weights if share]
    assert len(shares) >= 10
    assert all(share == {"2": 0.2} for share in shares)
    assert alias() == ("2", {})
    dimensions = {
        dimension["Name"]: dimension["Value"]
        for alarm in alarms()
        for dimension in alarm.get("Dimensions", [])
    }
    assert dimensions == {
        "FunctionName": "digits",
        "Resource": "digits:live",
        "ExecutedVersion": "2",
    }
    deploy.plan(CANARY, NEW_VERSION, code=0)


@pytest.mark.parametrize("source", ["state", "history"])
def test_an_alarm_withdraws_a_canary_even_if_it_has_recovered(
    deploy: Deploy, scenario: Scenario, clock: Clock, source: str
) -> None:
    deploy.apply(CANARY)

    def set_off(waits: int) -> None:
        if not alias()[1]:
            return
        name = next(
            alarm["AlarmName"]
            for alarm in alarms()
            if {"Name": "ExecutedVersion", "Value": "2"} in alarm.get("Dimensions", [])
        )
        if source == "state":
            boto3.client("cloudwatch").set_alarm_state(
                AlarmName=name, StateValue="ALARM", StateReason="5 failures in a minute"
            )
        else:
            scenario.alarmed.append((name, clock.now))

    clock.on_wait = set_off
    out = deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "percent=20.0, bake=600, alarms=tsx-digits-5xx-0-" in out
    assert "all requests again: the alarm tsx-digits-" in deploy.err
    assert alias() == ("1", {})


@pytest.mark.nightly
def test_an_interrupted_canary_keeps_its_share_and_continues(deploy: Deploy, clock: Clock) -> None:
    deploy.apply(CANARY)
    clock.on_wait = interrupt_canary
    deploy.apply(CANARY, NEW_VERSION, code=130)
    assert "keeps its share of the requests" in deploy.err
    assert alias() == ("1", {"2": 0.2})
    (canary,) = deploy.read_json("status")["canary"]
    assert canary == {"version": "2", "percent": 20.0, "model": "digits/1.0"}
    # The canary bakes for ten minutes.
    clock.now += timedelta(minutes=8)
    clock.on_wait, clock.waits = (lambda waits: None), 0
    deploy.apply(CANARY, NEW_VERSION)
    assert alias() == ("2", {})
    assert clock.waits <= 3


@pytest.mark.parametrize(("verb", "version"), [("promote", "2"), ("rollback", "1")])
def test_an_interrupted_canary_is_promoted_or_rolled_back(
    deploy: Deploy, clock: Clock, verb: str, version: str
) -> None:
    deploy.apply(CANARY)
    clock.on_wait = interrupt_canary
    deploy.apply(CANARY, NEW_VERSION, code=130)
    deploy.verb(verb, "--yes")
    assert alias() == (version, {})
    deploy.verb("promote", "--yes", code=1)
    assert "digits has no canary" in deploy.err
    deploy("promote --name nobody --target lambda", code=1)
    assert "there is no deployment 'nobody'" in deploy.err


def test_no_canary_begins_during_an_alarm(deploy: Deploy, clock: Clock) -> None:
    deploy.apply()
    client = boto3.client("cloudwatch")
    client.put_metric_alarm(
        AlarmName="theirs", ComparisonOperator="GreaterThanThreshold", EvaluationPeriods=1, MetricName="m", Namespace="n", Period=60,
        Statistic="Sum", Threshold=1,
    )  # fmt: skip
    client.set_alarm_state(AlarmName="theirs", StateValue="ALARM", StateReason="since yesterday")
    deploy.apply("--canary=10 --alarm=theirs", NEW_VERSION, code=1)
    assert "the alarm theirs went off" in deploy.err
    deploy.apply("--canary=10 --alarm=absent", NEW_VERSION, code=1)
    assert "there is no alarm 'absent'" in deploy.err


def test_queue_url_and_concurrency_of_a_function_are_created_and_removed(
    deploy: Deploy, scenario: Scenario
) -> None:
    client = boto3.client("lambda")

    def mappings() -> list[Any]:
        response = client.list_event_source_mappings(FunctionName="digits:live")
        return list(response["EventSourceMappings"])

    def provisioned() -> int:
        return int(scenario.provisioned["digits:live"]["RequestedProvisionedConcurrentExecutions"])

    boto3.client("sqs").create_queue(QueueName="images")
    queue = f"--set=lambda.queue.arn={QUEUE}"
    deploy.apply(
        f"{queue} --set=lambda.queue.batch_size=100 --set=lambda.queue.concurrency=4",
        "--set=lambda.url=public --set=lambda.reserved=7 --set=lambda.autoscaling.max=9",
    )
    policy = json.loads(client.get_policy(FunctionName="digits", Qualifier="live")["Policy"])
    assert {statement["Action"] for statement in policy["Statement"]} == {
        "lambda:InvokeFunctionUrl",
        "lambda:InvokeFunction",
    }
    (mapping,) = mappings()
    assert mapping["BatchSize"] == 100
    assert mapping["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    concurrency = client.get_function(FunctionName="digits")["Concurrency"]
    assert concurrency["ReservedConcurrentExecutions"] == 7
    assert provisioned() == 1
    assert scalable_targets("lambda")[0]["MaxCapacity"] == 9
    status = deploy.read_json("status")
    assert status["queues"] == [{"arn": QUEUE, "state": "Enabled"}]
    assert status["provisioned"] == 1
    deploy.apply(queue, "--set=lambda.url=off --set=lambda.provisioned=3")
    assert "Concurrency" not in client.get_function(FunctionName="digits")
    assert provisioned() == 3
    (mapping,) = mappings()
    assert (mapping["BatchSize"], mapping["ScalingConfig"]) == (10, {})
    assert not scalable_targets("lambda")
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.get_policy(FunctionName="digits", Qualifier="live")
    deploy.apply()
    assert scenario.provisioned == {}
    assert not mappings()


def test_managed_instances_are_created_before_the_function_that_runs_on_them(
    deploy: Deploy, scenario: Scenario
) -> None:
    role = "arn:aws:iam::123456789012:role/operator"
    settings = {"subnets": "subnet-1", "operator_role": role, "gpu_memory": 24, "concurrency": 32}
    arguments = [f"--set=lambda.managed_instances.{key}={value}" for key, value in settings.items()]
    arguments.append("--set=lambda.memory=16384")
    deploy.apply(*arguments)
    function = boto3.client("lambda").get_function_configuration(
        FunctionName="digits", Qualifier="live"
    )
    arn = scenario.providers["tsx-digits"]["CapacityProviderArn"]
    assert function["CapacityProviderConfig"]["LambdaManagedInstancesCapacityProviderConfig"] == {
        "CapacityProviderArn": arn, "PerExecutionEnvironmentMaxConcurrency": 32
    }  # fmt: skip
    assert function["AcceleratorConfig"] == {"AcceleratorMemorySize": 24}
    deploy.plan(*arguments, code=0)
    deploy.verb("destroy", "--yes")
    assert scenario.providers == {}


def test_a_failed_update_keeps_the_former_version_and_can_continue(
    deploy: Deploy, scenario: Scenario
) -> None:
    deploy.apply()
    scenario.failure = "ECR image is gone"
    deploy.apply("--image", OTHER_IMAGE, code=1)
    assert "previous state: ECR image is gone" in deploy.err
    assert "The container wrote no log line" not in deploy.err
    assert alias()[0] == "1"
    scenario.failure = ""
    deploy.apply("--image", OTHER_IMAGE)
    assert alias()[0] == "2"


def test_destroy_removes_everything(deploy: Deploy) -> None:
    boto3.client("sqs").create_queue(QueueName="images")
    deploy.apply(CANARY, f"--set=lambda.queue.arn={QUEUE} --set=lambda.autoscaling.max=3")
    deploy.apply(NEW_VERSION, "--canary=10 --bake=0")
    deploy.verb("destroy", "--yes")
    client = boto3.client("lambda")
    assert not client.list_functions()["Functions"]
    assert not client.list_event_source_mappings()["EventSourceMappings"]
    assert not alarms()
    deploy.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'digits'" in deploy.err


def test_invoke_sends_a_file_and_prints_the_response(deploy: Deploy, tmp_path: Path) -> None:
    deploy.apply()
    for content, code, error in (
        ("7", 0, ""),
        ("bad", 1, "digits answered 400: bad"),
        ("raise", 1, "digits failed: the model did not load"),
    ):
        (tmp_path / "in.json").write_text(content)
        out = deploy.verb("invoke", "in.json", code=code)
        assert error in deploy.err
        assert out == ("7\n" if code == 0 else "")
    (tmp_path / "in.json").write_text("7")
    assert json.loads(deploy.verb("invoke", "in.json", "--json")) == {
        "status": 200,
        "content_type": "application/json",
        "answer": 7,
    }


def test_a_foreign_function_is_not_changed(deploy: Deploy) -> None:
    boto3.client("lambda").create_function(
        FunctionName="digits",
        PackageType="Image",
        Code={"ImageUri": IMAGE},
        Role=ROLE,
    )
    deploy.apply(code=1)
    assert "tsx deploy did not make it" in deploy.err
    deploy.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'digits'" in deploy.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--set=lambda.memry=2", "'lambda.memry'; did you mean 'memory'?"),
        ("--set=lambda.memory=20000", "lambda.memory: Lambda gives at most 10240 MiB"),
        (
            "--set=lambda.managed_instances.concurrency=4",
            "needs subnets and operator_role",
        ),
        (
            "--set=lambda.queue.arn=arn:aws:sqs:a:1:c.fifo --set=lambda.queue.batch_size=11",
            "a queue that is not FIFO",
        ),
        ("--set=lambda.queue.arn=images", "lambda.queue.arn: String should match"),
        ("--role digits", "lambda.role: a role must be an ARN"),
        ("--set=lambda.timeout=20m", "lambda.timeout: Input should be less"),
    ],
)
def test_an_invalid_specification_is_refused_before_anything_is_created(
    deploy: Deploy, scenario: Scenario, arguments: str, error: str
) -> None:
    deploy.apply(arguments, code=2)
    assert error in deploy.err
    assert "lambda:CreateFunction" not in scenario.operations


def test_a_role_is_created_on_request_and_removed_with_the_rest(deploy: Deploy) -> None:
    deploy.apply("--create-role", "--role", ROLE, code=2)
    assert "--create-role creates one" in deploy.err
    deploy.apply("--create-role")
    client = boto3.client("iam")
    role = client.get_role(RoleName="tsx-digits-lambda")["Role"]
    principal = role["AssumeRolePolicyDocument"]["Statement"][0]["Principal"]
    assert principal == {"Service": "lambda.amazonaws.com"}
    function = boto3.client("lambda").get_function_configuration(FunctionName="digits")
    assert function["Role"] == role["Arn"]
    deploy.plan("--create-role", code=0)
    deploy.verb("destroy", "--yes")
    assert [role["RoleName"] for role in client.list_roles()["Roles"]] == ["deployed"]


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_canary_that_another_user_rolls_back_is_not_restarted(
    deploy: Deploy, clock: Clock, is_continued: bool
) -> None:
    deploy.apply(CANARY)
    if is_continued:
        clock.on_wait = interrupt_canary
        deploy.apply(CANARY, NEW_VERSION, code=130)
    clock.on_wait = lambda waits: deploy.verb("rollback", "--yes") if alias()[1] else None
    deploy.apply(CANARY, NEW_VERSION, code=1)
    assert "digits:live was rolled back" in deploy.err
    assert alias() == ("1", {})


def test_a_streamed_response_is_printed_without_its_header(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The import is inside the test, since it is slow.
    from moto.awslambda.responses import LambdaResponse

    deploy.apply("--set=lambda.streaming=true")
    (tmp_path / "in.json").write_text("{}")
    for status, code in ((200, 0), (503, 1)):
        body = json.dumps({"statusCode": status, "headers": {}}).encode() + bytes(8) + b"seven"
        response = (200, {"content-type": "x"}, body)
        monkeypatch.setattr(LambdaResponse, "invoke", lambda _, response=response: response)
        assert deploy.verb("invoke", "in.json", code=code) == ("" if code else "seven")
    assert "digits answered 503: seven" in deploy.err


def test_plans_hide_the_values_of_secret_variables(deploy: Deploy) -> None:
    deploy.apply("--set=env.API_TOKEN=one-secret --set=env.LEVEL=low")
    arguments = deploy.wish("--set=env.API_TOKEN=other-secret --set=env.LEVEL=high")
    for form in ("", "--json"):
        plan = deploy("plan", *arguments, form, code=2)
        assert "secret" not in plan
        assert "(hidden)" in plan
        assert "high" in plan
