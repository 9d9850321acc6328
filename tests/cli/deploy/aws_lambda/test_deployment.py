"""`tsx deploy` to Lambda, against moto's control plane: made, unchanged, updated, shifted, gone
back, failed and picked up, removed.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.deploying import IMAGE, OTHER_IMAGE, Deploy, actions
from tests.support.platforms.aws import Course
from tests.support.platforms.aws_lambda import make_role
from tsx_cli.deploy.aws_lambda import kinds as lambda_kinds
from tsx_cli.deploy.commands import locations
from tsx_cli.deploy.engine import engine

pytestmark = pytest.mark.slow


QUEUE = "arn:aws:sqs:eu-central-1:123456789012:images"
CANARY = ("--canary=20%", "--bake=10m", "--alarm=5xx>0", "--alarm=p95>300ms")


@pytest.fixture
def deploy(archive: Path, course: Course, capsys: pytest.CaptureFixture[str]) -> Deploy:
    make_role()
    return Deploy(archive, "lambda", capsys)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lambda_kinds, "now", lambda: clock.now)
    monkeypatch.setattr(locations, "Engine", partial(engine.Engine, sleep=clock.sleep))
    return clock


class Clock:
    """Each wait takes a minute, and something may happen in it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 21, tzinfo=timezone.utc)
        self.waits = 0
        self.happens: Any = lambda waits: None

    def sleep(self, seconds: float) -> None:
        self.now += timedelta(minutes=1)
        self.waits += 1
        self.happens(self.waits)


def alias() -> dict[str, Any]:
    found = boto3.client("lambda").get_alias(FunctionName="digits", Name="live")
    return {
        "version": found["FunctionVersion"],
        "weights": found.get("RoutingConfig", {}).get("AdditionalVersionWeights", {}),
    }


def test_a_function_is_planned_made_and_then_as_it_should_be(
    deploy: Deploy, course: Course
) -> None:
    course.looks = 2
    assert set(actions(deploy.plan(code=2)).values()) == {"create"}
    out = deploy.apply()
    assert "lambda-url" in out
    assert "Function digits: created" in deploy.err
    assert actions(deploy.plan(code=0)) == dict.fromkeys(
        ["LogGroup", "Function", "Version", "Alias", "Url"], "same"
    )
    before = len([each for each in course.asked if "Publish" in each])
    deploy.apply()
    assert len([each for each in course.asked if "Publish" in each]) == before
    found = boto3.client("lambda").get_function(FunctionName="digits", Qualifier="live")
    assert found["Code"]["ImageUri"] == IMAGE
    assert (found["Configuration"]["MemorySize"], found["Configuration"]["Timeout"]) == (3008, 60)


def test_what_changes_is_a_new_version_and_the_former_stays_as_it_was(
    deploy: Deploy, course: Course
) -> None:
    deploy.apply("--set=env.A=1")
    course.looks = 1
    reported = deploy.plan("--image", OTHER_IMAGE, "--set=lambda.memory=4096", code=2)
    assert actions(reported) == {
        "LogGroup": "same",
        "Function": "update",
        "Version": "create",
        "Alias": "update",
        "Url": "same",
    }
    out = deploy.apply("--image", OTHER_IMAGE, "--set=lambda.memory=4096")
    assert "MemorySize: 3008 -> 4096" in out
    assert alias() == {"version": "2", "weights": {}}
    client = boto3.client("lambda")
    one, two = (
        client.get_function(FunctionName="digits", Qualifier=number) for number in ("1", "2")
    )
    assert [each["Code"]["ImageUri"] for each in (one, two)] == [IMAGE, OTHER_IMAGE]
    assert (
        "Environment" not in two["Configuration"]
    )  # a variable that nobody names any more is gone
    assert set(
        actions(deploy.plan("--image", OTHER_IMAGE, "--set=lambda.memory=4096", code=0)).values()
    ) == {"same"}


def test_going_back_points_to_the_earlier_version_and_forward_makes_no_other(
    deploy: Deploy,
) -> None:
    deploy.apply()
    deploy.apply("--set=lambda.timeout=90s")
    assert [(each["number"], each["is_current"], each["tags"]["tsx:model"]) for each in deploy.reported("history")] == [
        (1, False, "digits/1.0"), (2, True, "digits/1.0")
    ]  # fmt: skip
    deploy.verb("rollback", "--yes")
    assert alias()["version"] == "1"
    deploy.verb("rollback", "--yes", code=1)
    assert "has no earlier version" in deploy.err
    deploy.apply("--set=lambda.timeout=90s")
    assert alias()["version"] == "2"
    assert len(deploy.reported("history")) == 2


def test_versions_beyond_those_that_are_kept_go_and_their_numbers_never_come_again(
    deploy: Deploy,
) -> None:
    for memory in (1024, 2048, 3072, 4096):
        deploy.apply(f"--set=lambda.memory={memory}", "--set=keep=2")
    assert [each["number"] for each in deploy.reported("history")] == [3, 4]
    deploy.apply("--set=lambda.memory=4096", "--set=lambda.timeout=90", "--set=keep=1")
    deploy.plan("--set=lambda.memory=4096", "--set=lambda.timeout=90", "--set=keep=1", code=0)


def test_a_canary_has_its_share_until_it_has_baked(deploy: Deploy, clock: Clock) -> None:
    deploy.apply(*CANARY)
    assert alias() == {"version": "1", "weights": {}}  # the first has nobody to share with
    seen = []
    clock.happens = lambda waits: seen.append(alias())
    deploy.apply(*CANARY, "--set=lambda.memory=2048")
    shares = [each["weights"] for each in seen if each["weights"]]
    assert len(shares) >= 10
    assert all(each == {"2": 0.2} for each in shares)
    assert alias() == {"version": "2", "weights": {}}
    alarms = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    dimensions = {
        each["Name"]: each["Value"] for alarm in alarms for each in alarm.get("Dimensions", [])
    }
    assert dimensions == {
        "FunctionName": "digits",
        "Resource": "digits:live",
        "ExecutedVersion": "2",
    }
    assert set(actions(deploy.plan(*CANARY, "--set=lambda.memory=2048", code=0)).values()) == {
        "same"
    }


@pytest.mark.parametrize("how", ["state", "history"])
def test_an_alarm_sends_a_canary_back_also_one_that_went_off_and_recovered(
    deploy: Deploy, course: Course, clock: Clock, how: str
) -> None:
    deploy.apply(*CANARY)

    def goes_off(waits: int) -> None:
        if alias()["weights"]:
            client = boto3.client("cloudwatch")
            name = next(
                each["AlarmName"]
                for each in client.describe_alarms()["MetricAlarms"]
                if '"Value": "2"' in json.dumps(each, default=str)
            )
            if how == "state":
                client.set_alarm_state(
                    AlarmName=name, StateValue="ALARM", StateReason="5 failures in a minute"
                )
            else:
                course.alarmed.append((name, clock.now))

    clock.happens = goes_off
    out = deploy.apply(*CANARY, "--set=lambda.memory=2048", code=1)
    assert "percent=20.0, bake=600, alarms=tsx-digits-5xx-0-" in out
    assert "all requests again: the alarm tsx-digits-" in deploy.err
    assert alias() == {"version": "1", "weights": {}}


def test_a_canary_that_is_left_keeps_its_share_and_is_picked_up(
    deploy: Deploy, clock: Clock
) -> None:
    deploy.apply(*CANARY)

    def leave(waits: int) -> None:
        if alias()["weights"]:
            raise KeyboardInterrupt

    clock.happens = leave
    deploy.apply(*CANARY, "--set=lambda.memory=2048", code=130)
    assert (
        "keeps its share of the requests"
        in deploy.err
    )
    assert alias() == {"version": "1", "weights": {"2": 0.2}}
    assert deploy.reported("status")["canary"] == [
        {"version": "2", "percent": 20.0, "model": "digits/1.0"}
    ]
    clock.now += timedelta(minutes=8)  # of ten
    clock.happens, clock.waits = (lambda waits: None), 0
    deploy.apply(*CANARY, "--set=lambda.memory=2048")
    assert alias() == {"version": "2", "weights": {}}
    assert clock.waits <= 3


@pytest.mark.parametrize(("verb", "version"), [("promote", "2"), ("rollback", "1")])
def test_a_canary_that_was_left_is_promoted_or_taken_back(
    deploy: Deploy, clock: Clock, verb: str, version: str
) -> None:
    deploy.apply(*CANARY)
    clock.happens = lambda waits: (
        (_ for _ in ()).throw(KeyboardInterrupt) if alias()["weights"] else None
    )
    deploy.apply(*CANARY, "--set=lambda.memory=2048", code=130)
    deploy.verb(verb, "--yes")
    assert alias() == {"version": version, "weights": {}}
    deploy.verb("promote", "--yes", code=1)
    assert "digits has no canary" in deploy.err
    deploy("promote", "--name", "nobody", "--target", "lambda", code=1)
    assert "there is no deployment 'nobody'" in deploy.err


def test_an_alarm_that_is_off_already_lets_no_canary_begin(deploy: Deploy, clock: Clock) -> None:
    deploy.apply()
    client = boto3.client("cloudwatch")
    client.put_metric_alarm(
        AlarmName="theirs", ComparisonOperator="GreaterThanThreshold", EvaluationPeriods=1, MetricName="m", Namespace="n", Period=60,
        Statistic="Sum", Threshold=1,
    )  # fmt: skip
    client.set_alarm_state(AlarmName="theirs", StateValue="ALARM", StateReason="since yesterday")
    words = ("--canary=10", "--alarm=theirs", "--set=lambda.memory=2048")
    deploy.apply(*words, code=1)
    assert "the alarm theirs went off" in deploy.err
    deploy.apply(words[0], "--alarm=absent", words[2], code=1)
    assert "there is no alarm 'absent'" in deploy.err


def test_all_that_stands_around_a_function_is_made_and_taken_away(
    deploy: Deploy, course: Course
) -> None:
    boto3.client("sqs").create_queue(QueueName="images")
    deploy.apply(
        f"--set=lambda.queue.arn={QUEUE}", "--set=lambda.queue.batch_size=100", "--set=lambda.url=public", "--set=lambda.reserved=7", "--set=lambda.autoscaling.max=9", "--set=lambda.queue.concurrency=4",
    )  # fmt: skip
    client = boto3.client("lambda")
    said = json.loads(client.get_policy(FunctionName="digits", Qualifier="live")["Policy"])[
        "Statement"
    ]
    assert {each["Action"] for each in said} == {
        "lambda:InvokeFunctionUrl",
        "lambda:InvokeFunction",
    }
    mapping = client.list_event_source_mappings(FunctionName="digits:live")["EventSourceMappings"][
        0
    ]
    assert (mapping["BatchSize"], mapping["FunctionResponseTypes"]) == (
        100,
        ["ReportBatchItemFailures"],
    )
    assert (
        client.get_function(FunctionName="digits")["Concurrency"]["ReservedConcurrentExecutions"]
        == 7
    )
    assert course.provisioned["digits:live"]["RequestedProvisionedConcurrentExecutions"] == 1
    scaling = boto3.client("application-autoscaling")
    assert (
        scaling.describe_scalable_targets(ServiceNamespace="lambda")["ScalableTargets"][0][
            "MaxCapacity"
        ]
        == 9
    )
    reported = deploy.reported("status")
    assert (reported["queues"], reported["provisioned"]) == (
        [{"arn": QUEUE, "state": "Enabled"}],
        1,
    )
    deploy.apply(
        f"--set=lambda.queue.arn={QUEUE}",
        "--set=lambda.url=off",
        "--set=lambda.provisioned=3",
    )
    assert "Concurrency" not in client.get_function(FunctionName="digits")
    assert course.provisioned["digits:live"]["RequestedProvisionedConcurrentExecutions"] == 3
    mapping = client.list_event_source_mappings(FunctionName="digits:live")["EventSourceMappings"][
        0
    ]
    assert (mapping["BatchSize"], mapping["ScalingConfig"]) == (10, {})
    assert not scaling.describe_scalable_targets(ServiceNamespace="lambda")["ScalableTargets"]
    with pytest.raises(client.exceptions.ResourceNotFoundException):
        client.get_policy(FunctionName="digits", Qualifier="live")
    deploy.apply()
    assert course.provisioned == {}
    assert not client.list_event_source_mappings(FunctionName="digits:live")["EventSourceMappings"]


def test_managed_instances_are_made_before_the_function_that_runs_on_them(
    deploy: Deploy, course: Course
) -> None:
    own = "lambda.managed_instances."
    words = [
        f"{own}subnets=subnet-1",
        f"{own}operator_role=arn:aws:iam::123456789012:role/operator",
        f"{own}gpu_memory=24",
        f"{own}concurrency=32",
    ]
    said = [word for each in words for word in ("--set", each)]
    deploy.apply(*said, "--set=lambda.memory=16384")
    found = boto3.client("lambda").get_function_configuration(
        FunctionName="digits", Qualifier="live"
    )
    arn = course.providers["tsx-digits"]["CapacityProviderArn"]
    assert found["CapacityProviderConfig"]["LambdaManagedInstancesCapacityProviderConfig"] == {
        "CapacityProviderArn": arn, "PerExecutionEnvironmentMaxConcurrency": 32
    }  # fmt: skip
    assert found["AcceleratorConfig"] == {"AcceleratorMemorySize": 24}
    assert set(actions(deploy.plan(*said, "--set=lambda.memory=16384", code=0)).values()) == {
        "same"
    }
    deploy.verb("destroy", "--yes")
    assert course.providers == {}


def test_an_update_that_fails_leaves_the_former_version_and_is_picked_up(
    deploy: Deploy, course: Course
) -> None:
    deploy.apply()
    course.failure = "ECR image is gone"
    deploy.apply("--image", OTHER_IMAGE, code=1)
    assert "previous state: ECR image is gone" in deploy.err
    assert (
        "The container wrote no log line"
        not in deploy.err
    )
    assert alias()["version"] == "1"
    course.failure = ""
    deploy.apply("--image", OTHER_IMAGE)
    assert alias()["version"] == "2"


def test_destroy_leaves_nothing(deploy: Deploy) -> None:
    boto3.client("sqs").create_queue(QueueName="images")
    deploy.apply(*CANARY, f"--set=lambda.queue.arn={QUEUE}", "--set=lambda.autoscaling.max=3")
    deploy.apply("--set=lambda.memory=2048", "--canary=10", "--bake=0")
    deploy.verb("destroy", "--yes")
    client = boto3.client("lambda")
    assert not [
        *client.list_functions()["Functions"],
        *client.list_event_source_mappings()["EventSourceMappings"],
    ]
    assert not boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    deploy.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'digits'" in deploy.err


def test_a_file_is_sent_as_the_url_would_and_the_answer_printed(
    deploy: Deploy, tmp_path: Path
) -> None:
    deploy.apply()
    for content, code, said in (
        ("7", 0, ""),
        ("bad", 1, "digits answered 400: bad"),
        ("raise", 1, "digits failed: the model did not load"),
    ):
        (tmp_path / "in.json").write_text(content)
        out = deploy.verb("invoke", "in.json", code=code)
        assert said in deploy.err
        assert out == ("7\n" if code == 0 else "")
    (tmp_path / "in.json").write_text("7")
    assert json.loads(deploy.verb("invoke", "in.json", "--json")) == {
        "status": 200,
        "content_type": "application/json",
        "answer": 7,
    }


def test_a_function_that_somebody_else_has_made_is_left_alone(deploy: Deploy) -> None:
    boto3.client("lambda").create_function(
        FunctionName="digits",
        PackageType="Image",
        Code={"ImageUri": IMAGE},
        Role="arn:aws:iam::123456789012:role/deployed",
    )
    deploy.apply(code=1)
    assert (
        "tsx deploy did not make it"
        in deploy.err
    )
    deploy.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'digits'" in deploy.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set=lambda.memry=2"], "'lambda.memry'; did you mean 'memory'?"),
        (
            ["--set=lambda.memory=20000"],
            "lambda.memory: Lambda gives at most 10240 MiB",
        ),
        (
            ["--set=lambda.managed_instances.concurrency=4"],
            "needs subnets and operator_role",
        ),
        (
            [
                "--set=lambda.queue.arn=arn:aws:sqs:a:1:c.fifo",
                "--set=lambda.queue.batch_size=11",
            ],
            "a queue that is not FIFO",
        ),
        (
            ["--set=lambda.queue.arn=images"],
            "lambda.queue.arn: String should match",
        ),
        (
            ["--role", "digits"],
            "lambda.role: a role must be an ARN",
        ),
        (
            ["--set=lambda.timeout=20m"],
            "lambda.timeout: Input should be less",
        ),
    ],
)
def test_what_makes_no_sense_is_reported_before_anything_is_asked_of_aws(
    deploy: Deploy, course: Course, words: list[str], said: str
) -> None:
    deploy.apply(*words, code=2)
    assert said in deploy.err
    assert "lambda:CreateFunction" not in course.asked


def test_a_role_is_made_on_request_and_removed_with_the_rest(deploy: Deploy) -> None:
    deploy.apply("--create-role", "--role", "arn:aws:iam::123456789012:role/deployed", code=2)
    assert "--create-role creates one" in deploy.err
    deploy.apply("--create-role")
    client = boto3.client("iam")
    made = client.get_role(RoleName="tsx-digits-lambda")["Role"]
    assert made["AssumeRolePolicyDocument"]["Statement"][0]["Principal"] == {
        "Service": "lambda.amazonaws.com"
    }
    assert (
        boto3.client("lambda").get_function_configuration(FunctionName="digits")["Role"]
        == made["Arn"]
    )
    assert set(actions(deploy.plan("--create-role", code=0)).values()) == {"same"}
    deploy.verb("destroy", "--yes")
    assert [each["RoleName"] for each in client.list_roles()["Roles"]] == ["deployed"]


def test_a_canary_that_somebody_takes_back_meanwhile_is_not_begun_again(
    deploy: Deploy, clock: Clock
) -> None:
    deploy.apply(*CANARY)
    clock.happens = lambda waits: deploy.verb("rollback", "--yes") if alias()["weights"] else None
    deploy.apply(*CANARY, "--set=lambda.memory=2048", code=1)
    assert "digits:live was rolled back" in deploy.err


def test_a_canary_that_is_gone_on_with_and_taken_back_meanwhile_is_not_begun_again(
    deploy: Deploy, clock: Clock
) -> None:
    deploy.apply(*CANARY)
    clock.happens = lambda waits: (
        (_ for _ in ()).throw(KeyboardInterrupt) if alias()["weights"] else None
    )
    deploy.apply(*CANARY, "--set=lambda.memory=2048", code=130)
    clock.happens = lambda waits: deploy.verb("rollback", "--yes") if alias()["weights"] else None
    deploy.apply(*CANARY, "--set=lambda.memory=2048", code=1)
    assert "digits:live was rolled back" in deploy.err
    assert alias() == {"version": "1", "weights": {}}


def test_an_answer_that_is_streamed_is_printed_without_its_head(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moto.awslambda.responses import LambdaResponse  # slow to import, and here alone

    deploy.apply("--set=lambda.streaming=true")
    (tmp_path / "in.json").write_text("{}")
    for status, code in ((200, 0), (503, 1)):
        answer = json.dumps({"statusCode": status, "headers": {}}).encode() + bytes(8) + b"seven"
        monkeypatch.setattr(
            LambdaResponse,
            "invoke",
            lambda response, answer=answer: (200, {"content-type": "x"}, answer),
        )
        assert deploy.verb("invoke", "in.json", code=code) == ("" if code else "seven")
    assert "digits answered 503: seven" in deploy.err


def test_values_of_secret_variables_are_in_no_plan(deploy: Deploy) -> None:
    deploy.apply("--set=env.API_TOKEN=one-secret", "--set=env.LEVEL=low")
    words = deploy.wish("--set=env.API_TOKEN=other-secret", "--set=env.LEVEL=high")
    for form in ((), ("--json",)):
        reported = deploy("plan", *words, *form, code=2)
        assert "secret" not in reported
        assert "(hidden)" in reported
        assert "high" in reported
