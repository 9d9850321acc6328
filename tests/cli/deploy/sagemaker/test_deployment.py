"""`tsx deploy` to SageMaker with moto: plans, changes, rollbacks, failures and removal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest

from tests.kit.deploy import (
    alarms,
    endpoint_config,
    interrupted_waits,
    model_container,
    sagemaker,
    sagemaker_resources,
    scalable_targets,
    scaling_policies,
)
from tests.support.deploying import FACTS, HANDLER, IMAGE, ROLE, Deploy, a_spec, actions
from tests.support.models import make_model
from tests.support.platforms.aws import Scenario
from tsx_cli.deploy.sagemaker.resources import model_properties

BUCKET = "tsx-123456789012-eu-central-1"
RESOURCES = ("Bucket", "ModelData", "LogGroup", "Model", "EndpointConfig")


@pytest.fixture
def deploy(deploy_to: Callable[..., Deploy]) -> Deploy:
    return deploy_to("sagemaker")


def test_an_endpoint_is_planned_created_and_then_unchanged(
    deploy: Deploy, scenario: Scenario
) -> None:
    scenario.polls = 2
    assert set(actions(deploy.plan(code=2)).values()) == {"create"}
    assert scenario.calls == []
    out = deploy.apply()
    assert "InService" in out
    assert "Endpoint digits: created" in deploy.err
    deploy.plan(code=0)
    deploy.apply()
    assert len(scenario.calls) == 1
    [variant] = endpoint_config()["ProductionVariants"]
    container = model_container(variant["ModelName"])
    bucket, key = container["ModelDataUrl"].removeprefix("s3://").split("/", 1)
    assert boto3.client("s3").head_object(Bucket=bucket, Key=key)["ContentLength"]
    assert container["Image"] == IMAGE


def test_a_change_gives_the_endpoint_a_new_configuration(
    deploy: Deploy, scenario: Scenario
) -> None:
    deploy.apply()
    changes = actions(deploy.plan("--set=sagemaker.instances=3", code=2))
    assert [changes[id] for id in RESOURCES if id != "Model"] == ["same"] * 3 + ["create"]
    out = deploy.apply("--set=sagemaker.instances=3")
    assert "EndpointConfigName: tsx-digits-" in out
    assert [call.split()[0] for call in scenario.calls] == ["CreateEndpoint", "UpdateEndpoint"]


def test_a_rollback_gives_the_endpoint_its_earlier_configuration(deploy: Deploy) -> None:
    deploy.apply()
    deploy.apply("--set=sagemaker.instances=2")
    versions = deploy.read_json("history")
    assert deploy.versions == [(1, False), (2, True)]
    deploy.verb("rollback", "--yes")
    assert deploy.read_json("status")["configuration"] == versions[0]["id"]
    deploy.verb("rollback", "--yes", code=1)
    assert "has no earlier version" in deploy.err
    deploy.verb("rollback", "--version=2", "--yes")
    assert deploy.read_json("status")["configuration"] == versions[1]["id"]
    deploy.verb("rollback", "--version=9", "--yes", code=2)
    assert "there is no version 9; there are 1, 2" in deploy.err


def test_promote_is_refused_for_sagemaker(deploy: Deploy, scenario: Scenario) -> None:
    deploy.apply()
    deploy.verb("promote", "--yes", code=1)
    assert "no traffic is being moved" in deploy.err
    scenario.polls = 9
    config = deploy.read_json("status")["configuration"]
    sagemaker().update_endpoint(EndpointName="digits", EndpointConfigName=config)
    deploy.verb("promote", "--yes", code=1)
    assert "after the bake time" in deploy.err


@pytest.mark.nightly
def test_only_as_many_versions_are_kept_as_the_specification_says(deploy: Deploy) -> None:
    for instances in range(1, 5):
        deploy.apply(f"--set=sagemaker.instances={instances} --set=keep=2")
    assert len(deploy.versions) == 2
    deploy.plan("--set=sagemaker.instances=4 --set=keep=2", code=0)


def test_a_canary_has_its_alarms_before_it_begins(deploy: Deploy) -> None:
    deploy.apply("--canary=20% --bake=5m --alarm=5xx>2 --alarm=p95>300ms")
    assert {(alarm["MetricName"], alarm["Threshold"]) for alarm in alarms()} == {
        ("Invocation5XXErrors", 2.0),
        ("ModelLatency", 300_000.0),
    }
    # `p99` is the name of an existing alarm.
    deploy.apply("--alarm=5xx>2 --alarm=p99", code=0)


@pytest.mark.nightly
def test_a_failed_creation_is_reported_and_can_continue(deploy: Deploy, scenario: Scenario) -> None:
    scenario.failure = "did not pass the ping health check."
    deploy.apply(code=1)
    assert f"{scenario.failure} Created by this run and still there: Bucket" in deploy.err
    scenario.failure = ""
    expected = dict.fromkeys(RESOURCES, "same") | {"Endpoint": "replace"}
    assert actions(deploy.plan(code=2)) == expected
    deploy.apply()
    assert deploy.read_json("status")["status"] == "InService"


def test_an_endpoint_in_creation_is_not_diagnosed(deploy: Deploy, scenario: Scenario) -> None:
    def interrupt(operation: str, request: str) -> None:
        if operation == "sagemaker:CreateEndpoint":
            raise KeyboardInterrupt

    scenario.polls, scenario.after = 50, interrupt
    deploy.apply(code=130)
    status = deploy.read_json("status")
    assert (status["status"], status["reason"], "diagnosis" in status) == ("Creating", "", False)


@pytest.mark.nightly
def test_an_update_that_aws_rolls_back_is_a_failure(deploy: Deploy, scenario: Scenario) -> None:
    deploy.apply()
    scenario.failure = "Alarm tsx-digits-5xx is in ALARM state."
    deploy.apply("--set=sagemaker.instances=2", code=1)
    assert f"digits was returned to its previous state: {scenario.failure[:-1]}" in deploy.err
    assert deploy.read_json("status")["status"] == "InService"


@pytest.mark.nightly
def test_scaling_is_set_and_removed(deploy: Deploy) -> None:
    deploy.apply("--set=sagemaker.autoscaling.max=3")
    (target,) = scalable_targets("sagemaker")
    assert target["ResourceId"] == "endpoint/digits/variant/AllTraffic"
    assert target["MaxCapacity"] == 3
    deploy.apply()
    assert not scalable_targets("sagemaker")


@pytest.mark.nightly
def test_destroy_with_purge_removes_everything(
    deploy: Deploy,
) -> None:
    deploy.apply("--canary=10 --set=sagemaker.autoscaling.max=3")
    deploy.apply("--set=sagemaker.instances=2")
    deploy.verb("destroy", code=1)
    assert "nothing was removed; without a terminal" in deploy.err
    deploy.verb("destroy", "--purge", "--yes")
    assert not sagemaker_resources()
    assert not alarms()
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=BUCKET)
    deploy.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'digits'" in deploy.err


def test_invoke_sends_a_file_and_prints_the_response(deploy: Deploy, tmp_path: Path) -> None:
    deploy.apply()
    (tmp_path / "in.json").write_text("{}")
    # moto always answers with this body.
    assert deploy.verb("invoke", "in.json") == "body"
    assert json.loads(deploy.verb("invoke", "in.json", "--json")) == {
        "status": 200,
        "content_type": "content_type",
        "answer": "body",
    }
    assert deploy.verb("invoke", "in.json", "--output", "answer") == ""
    assert (tmp_path / "answer").read_text() == "body"
    deploy.verb("invoke", "in.json", "--output", "answer", "--json", code=2)
    deploy("invoke", "absent.json", "--name", "digits", "--target", "sagemaker", code=1)
    assert "directory: 'absent.json'" in deploy.err


def test_a_foreign_endpoint_is_not_changed(
    deploy: Deploy, deploy_to: Callable[..., Deploy]
) -> None:
    deploy.apply()
    config = endpoint_config()["EndpointConfigName"]
    sagemaker().create_endpoint(EndpointName="theirs", EndpointConfigName=config)
    foreign = deploy_to("sagemaker", name="theirs")
    foreign.apply(code=1)
    assert "Endpoint theirs already exists, and tsx deploy did not make it" in foreign.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--set=sagemaker.instnces=2", "'sagemaker.instnces'; did you mean"),
        ("--set=sagemaker.startup_timeout=5s", "startup_timeout: Input should be greater"),
        ("--set=sagemaker", "--set takes KEY=VALUE, not 'sagemaker'"),
        ("--canary=80", "canary.percent: Input should be less"),
        ("--alarm=5xx>1ms", "has no unit: 5xx>1"),
        ("--set=sagemaker.serverless.memory=2048 --canary=10", "endpoint has no canary"),
        (
            "--set=sagemaker.autoscaling.min=5 --set=sagemaker.autoscaling.max=2",
            "min is 5, and max is 2",
        ),
        ("--set=sagemaker.autoscaling.min=0", "for asynchronous endpoints only"),
    ],
)
def test_an_invalid_specification_is_refused_before_aws_is_called(
    deploy: Deploy, scenario: Scenario, arguments: str, error: str
) -> None:
    deploy.apply(arguments, code=2)
    assert error in deploy.err
    assert scenario.calls == []


def test_the_file_provides_options_missing_from_the_command_line(
    deploy: Deploy, tmp_path: Path
) -> None:
    text = f'[deploy]\ntarget = "sagemaker"\nmodel = "{deploy.archive}"\nimage = "{IMAGE}"\n'
    text += f'[deploy.sagemaker]\nrole = "{ROLE}"\ninstances = 2\n[deploy.big]\nsagemaker = {{instances = 4}}\n'
    (tmp_path / "tsx.toml").write_text(text)
    for name, instances in (("small", 2), ("big", 4)):
        plan = json.loads(deploy("plan", "--name", name, "--json", code=2))
        config = next(change for change in plan["changes"] if change["id"] == "EndpointConfig")
        values = {field["path"]: field["new"] for field in config["fields"]}
        assert values["ProductionVariants"][0]["InitialInstanceCount"] == instances


def test_the_error_without_a_region_lists_the_options(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    # The variable AWS_REGION provides the region.
    deploy.plan(code=2)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "localhost")
        deploy.apply(code=1)
    assert "localhost: AWS_ENDPOINT_URL must" in deploy.err
    monkeypatch.delenv("AWS_REGION")
    deploy.apply(code=1)
    assert "no region: give --region" in deploy.err


def test_an_interrupted_start_is_resumed_and_its_failure_reported(
    deploy: Deploy, scenario: Scenario
) -> None:
    # The plan uses some of the polls.
    scenario.polls = 8
    with interrupted_waits():
        deploy.apply(code=130)
    scenario.failure = "The primary container did not pass the ping health check."
    deploy.apply(code=1)
    assert "digits has failed: The primary container" in deploy.err
    assert len(scenario.calls) == 1


@pytest.mark.nightly
def test_an_interrupted_update_that_was_rolled_back_is_not_repeated(
    deploy: Deploy, scenario: Scenario
) -> None:
    deploy.apply()
    scenario.polls = 8
    with interrupted_waits():
        deploy.apply("--set=sagemaker.instances=2", code=130)
    scenario.failure = "Alarm tsx-digits-5xx is in ALARM state."
    deploy.apply("--set=sagemaker.instances=2", code=1)
    assert "digits was returned to its previous state" in deploy.err
    assert [call.split()[0] for call in scenario.calls] == ["CreateEndpoint", "UpdateEndpoint"]


@pytest.mark.parametrize("option", ["--set=sagemaker.instnces=2", "--nonsense"])
def test_a_failed_plan_exits_with_the_code_of_an_error(
    deploy: Deploy, scenario: Scenario, option: str
) -> None:
    arguments = deploy.wish(option)
    # Exit code 2 means changes for a plan and a usage error for other commands.
    for command, code in ((["plan", *arguments], 1), ([*arguments, "--plan"], 1), (arguments, 2)):
        deploy(*command, code=code)
        assert option.rpartition("=")[0].rpartition(".")[2] in deploy.err
    assert scenario.calls == []


@pytest.mark.nightly
def test_foreign_scaling_is_not_changed(deploy: Deploy) -> None:
    deploy.apply()
    client = boto3.client("application-autoscaling")
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/digits/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    rule = {
        "TargetValue": 3.0,
        "PredefinedMetricSpecification": {
            "PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"
        },
    }
    client.register_scalable_target(**target, MinCapacity=1, MaxCapacity=7)
    client.put_scaling_policy(
        **target,
        PolicyName="theirs",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration=rule,
    )
    deploy.plan(code=0)
    deploy.apply()
    assert [policy["PolicyName"] for policy in scaling_policies("sagemaker")] == ["theirs"]
    assert scalable_targets("sagemaker")[0]["MaxCapacity"] == 7


@pytest.mark.nightly
def test_a_changing_endpoint_is_not_rolled_back(deploy: Deploy, scenario: Scenario) -> None:
    deploy.apply()
    deploy.apply("--set=sagemaker.instances=2")
    scenario.polls = 50
    with interrupted_waits():
        deploy.apply("--set=sagemaker.instances=3 --canary=10", code=130)
    deploy.verb("rollback", "--yes", code=1)
    assert "accepts no changes until that ends" in deploy.err


@pytest.mark.nightly
def test_purge_removes_old_uploads_and_keeps_foreign_repositories(
    deploy: Deploy, tmp_path: Path
) -> None:
    deploy.apply("--set=keep=1")
    deploy.archive = make_model(tmp_path / "digits.mar", HANDLER + "# changed\n")
    deploy.apply("--set=keep=1")
    deploy.plan("--set=keep=1", code=0)
    client = boto3.client("ecr")
    client.create_repository(repositoryName="tsx/sagemaker/digits")
    deploy.verb("destroy", "--purge", "--yes")
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=BUCKET)
    assert len(client.describe_repositories()["repositories"]) == 1


def test_an_asynchronous_endpoint_scales_by_its_backlog_and_to_zero(deploy: Deploy) -> None:
    arguments = (
        "--set=sagemaker.asynchronous.output=s3://answers/x --set=sagemaker.autoscaling.min=0"
    )
    deploy.apply(arguments)
    (rule,) = scaling_policies("sagemaker")
    metric = rule["TargetTrackingScalingPolicyConfiguration"]["CustomizedMetricSpecification"]
    assert metric["MetricName"] == "ApproximateBacklogSizePerInstance"
    assert metric["Dimensions"] == [{"Name": "EndpointName", "Value": "digits"}]
    deploy.plan(arguments, code=0)


def test_the_startup_timeout_equals_sagemakers() -> None:
    for timeout, variables in (
        ("10m", {}),
        ("1h", {"TSX_DEFAULTS": "default_startup_timeout=3600"}),
    ):
        spec = a_spec("sagemaker", sagemaker={"startup_timeout": timeout})
        container = model_properties(spec, FACTS, "s3://bucket/m.tar.gz")["PrimaryContainer"]
        assert container["Environment"] == {"TSX_TARGET": "sagemaker"} | variables
