"""`tsx deploy` to SageMaker, against moto's control plane: made, unchanged, updated, gone back,
failed and picked up, removed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import boto3
import pytest

from tests.support.deploying import FACTS, HANDLER, IMAGE, ROLE, Deploy, a_spec, actions
from tests.support.models import make_model
from tests.support.platforms.aws import Course
from tsx_cli.deploy.commands import locations
from tsx_cli.deploy.engine import engine
from tsx_cli.deploy.sagemaker.resources import model_properties

pytestmark = pytest.mark.slow


@pytest.fixture
def deploy(archive: Path, course: Course, capsys: pytest.CaptureFixture[str]) -> Deploy:
    return Deploy(archive, "sagemaker", capsys)


def test_an_endpoint_is_planned_made_and_then_as_it_should_be(
    deploy: Deploy, course: Course
) -> None:
    course.looks = 2
    assert set(actions(deploy.plan(code=2)).values()) == {"create"}
    assert course.calls == []  # a plan changes nothing
    out = deploy.apply()
    assert "InService" in out
    assert "Endpoint digits: created" in deploy.err
    assert set(actions(deploy.plan(code=0)).values()) == {"same"}
    deploy.apply()
    assert len(course.calls) == 1
    client = boto3.client("sagemaker")
    config = client.describe_endpoint_config(
        EndpointConfigName=client.describe_endpoint(EndpointName="digits")["EndpointConfigName"]
    )
    model = client.describe_model(ModelName=config["ProductionVariants"][0]["ModelName"])[
        "PrimaryContainer"
    ]
    bucket, key = model["ModelDataUrl"].removeprefix("s3://").split("/", 1)
    assert boto3.client("s3").head_object(Bucket=bucket, Key=key)["ContentLength"]
    assert model["Image"] == IMAGE


def test_a_change_is_shown_and_brings_the_endpoint_to_a_new_configuration(
    deploy: Deploy, course: Course
) -> None:
    deploy.apply()
    reported = deploy.plan("--set=sagemaker.instances=3", code=2)
    assert actions(reported) | {"Model": "", "Endpoint": ""} == {
        "Bucket": "same", "ModelData": "same", "LogGroup": "same", "Model": "", "EndpointConfig": "create", "Endpoint": ""
    }  # fmt: skip
    out = deploy.apply("--set=sagemaker.instances=3")
    assert "EndpointConfigName: tsx-digits-" in out
    assert [call.split()[0] for call in course.calls] == ["CreateEndpoint", "UpdateEndpoint"]


def test_going_back_gives_the_endpoint_its_earlier_configuration(deploy: Deploy) -> None:
    deploy.apply()
    deploy.apply("--set=sagemaker.instances=2")
    versions = deploy.reported("history")
    assert [(each["number"], each["is_current"]) for each in versions] == [(1, False), (2, True)]
    deploy.verb("rollback", "--yes")
    assert deploy.reported("status")["configuration"] == versions[0]["id"]
    deploy.verb("rollback", "--yes", code=1)
    assert "has no earlier version" in deploy.err
    deploy.verb("rollback", "--version=2", "--yes")
    assert deploy.reported("status")["configuration"] == versions[1]["id"]
    deploy.verb("rollback", "--version=9", "--yes", code=2)
    assert "there is no version 9; there are 1, 2" in deploy.err


def test_nobody_can_hurry_a_canary_of_sagemaker_and_promote_says_so(
    deploy: Deploy, course: Course
) -> None:
    deploy.apply()
    deploy.verb("promote", "--yes", code=1)
    assert "digits has no canary: no traffic is being moved" in deploy.err
    course.looks = 9
    config = deploy.reported("status")["configuration"]
    boto3.client("sagemaker").update_endpoint(EndpointName="digits", EndpointConfigName=config)
    deploy.verb("promote", "--yes", code=1)
    assert (
        "SageMaker moves the rest to the new version by itself, after the bake time" in deploy.err
    )


def test_versions_beyond_those_that_are_kept_go(deploy: Deploy) -> None:
    for instances in range(1, 5):
        deploy.apply(f"--set=sagemaker.instances={instances}", "--set=keep=2")
    assert len(deploy.reported("history")) == 2
    assert set(
        actions(deploy.plan("--set=sagemaker.instances=4", "--set=keep=2", code=0)).values()
    ) == {"same"}


def test_a_canary_has_its_alarms_before_it_begins(deploy: Deploy) -> None:
    deploy.apply("--canary=20%", "--bake=5m", "--alarm=5xx>2", "--alarm=p95>300ms")
    alarms = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert {(each["MetricName"], each["Threshold"]) for each in alarms} == {
        ("Invocation5XXErrors", 2.0),
        ("ModelLatency", 300_000.0),
    }
    deploy.apply(
        "--alarm=5xx>2", "--alarm=p99", code=0
    )  # the name of an alarm that somebody else has set


def test_a_creation_that_fails_says_why_and_what_is_there_and_is_picked_up(
    deploy: Deploy, course: Course
) -> None:
    course.failure = "The primary container for production variant AllTraffic did not pass the ping health check."
    deploy.apply(code=1)
    assert (
        "did not pass the ping health check. Created by this run and still there: Bucket"
        in deploy.err
    )
    course.failure = ""
    assert actions(deploy.plan(code=2)) == dict.fromkeys(
        ["Bucket", "ModelData", "LogGroup", "Model", "EndpointConfig"], "same"
    ) | {"Endpoint": "replace"}
    deploy.apply()
    assert deploy.reported("status")["status"] == "InService"


def test_an_endpoint_that_is_on_its_way_is_not_diagnosed(deploy: Deploy, course: Course) -> None:
    def leave(operation: str, said: str) -> None:
        if operation == "sagemaker:CreateEndpoint":
            raise KeyboardInterrupt

    course.looks, course.after = 50, leave
    deploy.apply(code=130)
    status = deploy.reported("status")
    assert (status["status"], status["reason"], "diagnosis" in status) == ("Creating", "", False)


def test_an_update_that_aws_takes_back_is_a_failure(deploy: Deploy, course: Course) -> None:
    deploy.apply()
    course.failure = "Alarm tsx-digits-5xx is in ALARM state."
    deploy.apply("--set=sagemaker.instances=2", code=1)
    assert (
        "digits was returned to its previous state: Alarm tsx-digits-5xx is in ALARM state"
        in deploy.err
    )
    assert deploy.reported("status")["status"] == "InService"


def test_scaling_is_set_and_taken_away(deploy: Deploy) -> None:
    deploy.apply("--set=sagemaker.autoscaling.max=3")
    scaling = boto3.client("application-autoscaling")
    found = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (found[0]["ResourceId"], found[0]["MaxCapacity"]) == (
        "endpoint/digits/variant/AllTraffic",
        3,
    )
    deploy.apply()
    assert not scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]


def test_destroy_leaves_nothing_but_what_was_uploaded_and_purge_not_even_that(
    deploy: Deploy,
) -> None:
    deploy.apply("--canary=10", "--set=sagemaker.autoscaling.max=3")
    deploy.apply("--set=sagemaker.instances=2")
    deploy.verb("destroy", code=1)
    assert "nothing was removed; without a terminal, confirm with --yes" in deploy.err
    deploy.verb("destroy", "--purge", "--yes")
    client = boto3.client("sagemaker")
    assert not [
        *client.list_models()["Models"],
        *client.list_endpoint_configs()["EndpointConfigs"],
        *client.list_endpoints()["Endpoints"],
    ]
    assert not boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert "Contents" not in boto3.client("s3").list_objects_v2(
        Bucket="tsx-123456789012-eu-central-1"
    )
    deploy.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'digits' in eu-central-1" in deploy.err


def test_a_file_is_sent_and_the_answer_printed(deploy: Deploy, tmp_path: Path) -> None:
    deploy.apply()
    (tmp_path / "in.json").write_text("{}")
    assert deploy.verb("invoke", "in.json") == "body"  # moto's answer
    assert json.loads(deploy.verb("invoke", "in.json", "--json")) == {
        "status": 200,
        "content_type": "content_type",
        "answer": "body",
    }
    assert deploy.verb("invoke", "in.json", "--output", "answer") == ""
    assert (tmp_path / "answer").read_text() == "body"
    deploy.verb("invoke", "in.json", "--output", "answer", "--json", code=2)
    deploy("invoke", "absent.json", "--name", "digits", "--target", "sagemaker", code=1)
    assert "No such file or directory: 'absent.json'" in deploy.err


def test_what_somebody_else_has_made_is_left_alone(deploy: Deploy) -> None:
    deploy.apply()
    client = boto3.client("sagemaker")
    config = client.describe_endpoint(EndpointName="digits")["EndpointConfigName"]
    client.create_endpoint(EndpointName="theirs", EndpointConfigName=config)
    said = [
        str(deploy.archive),
        "--target",
        "sagemaker",
        "--name",
        "theirs",
        "--role",
        ROLE,
        "--image",
        IMAGE,
        "--yes",
        "--no-check",
    ]
    deploy(*said, code=1)
    assert (
        "Endpoint theirs already exists, and tsx deploy did not make it; choose another --name"
        in deploy.err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--set=sagemaker.instnces=2"],
            "deploy has no key 'sagemaker.instnces'; did you mean 'instances'?",
        ),
        (
            ["--set=sagemaker.startup_timeout=5s"],
            "sagemaker.startup_timeout: Input should be greater than or equal to 60",
        ),
        (["--set=sagemaker"], "--set takes KEY=VALUE, not 'sagemaker'"),
        (["--canary=80"], "canary.percent: Input should be less than or equal to 50"),
        (["--alarm=5xx>1ms"], "5xx is a number of answers in a minute and has no unit: 5xx>1"),
        (
            ["--set=sagemaker.serverless.memory=2048", "--canary=10"],
            "a serverless endpoint has no canary",
        ),
        (
            ["--set=sagemaker.autoscaling.min=5", "--set=sagemaker.autoscaling.max=2"],
            "sagemaker.autoscaling: min is 5, and max is 2",
        ),
        (
            ["--set=sagemaker.autoscaling.min=0"],
            "which SageMaker allows for asynchronous endpoints only",
        ),
    ],
)
def test_what_makes_no_sense_is_reported_before_anything_is_asked_of_aws(
    deploy: Deploy, course: Course, words: list[str], said: str
) -> None:
    deploy.apply(*words, code=2)
    assert said in deploy.err
    assert course.calls == []


def test_the_file_says_what_the_command_line_does_not(deploy: Deploy, tmp_path: Path) -> None:
    text = f'[deploy]\ntarget = "sagemaker"\nmodel = "{deploy.archive}"\nimage = "{IMAGE}"\n'
    text += f'[deploy.sagemaker]\nrole = "{ROLE}"\ninstances = 2\n[deploy.big]\nsagemaker = {{instances = 4}}\n'
    (tmp_path / "tsx.toml").write_text(text)
    for name, instances in (("small", 2), ("big", 4)):
        reported = json.loads(deploy("plan", "--name", name, "--json", code=2))
        config = next(change for change in reported["changes"] if change["id"] == "EndpointConfig")
        values = {field["path"]: field["new"] for field in config["fields"]}
        assert values["ProductionVariants"][0]["InitialInstanceCount"] == instances


def test_without_a_region_the_way_to_name_one_is_reported(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    deploy.plan(code=2)  # AWS_REGION names it
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "localhost")
        deploy.apply(code=1)
    assert (
        "Invalid endpoint: localhost: AWS_ENDPOINT_URL must be an address such as http://"
        in deploy.err
    )
    monkeypatch.delenv("AWS_REGION")
    deploy.apply(code=1)
    assert "no region: give --region eu-central-1, or set AWS_REGION" in deploy.err


def test_a_start_that_was_left_is_waited_for_and_its_failure_reported(
    deploy: Deploy, course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    course.looks = 8  # some of them for the plan

    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(locations, "Engine", partial(engine.Engine, sleep=leave))
        deploy.apply(code=130)
    course.failure = "The primary container did not pass the ping health check."
    deploy.apply(code=1)
    assert (
        "digits has failed: The primary container did not pass the ping health check" in deploy.err
    )
    assert len(course.calls) == 1


def test_an_update_that_was_left_and_taken_back_is_not_begun_again(
    deploy: Deploy, course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply()
    course.looks = 8  # some of them for the plan

    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(locations, "Engine", partial(engine.Engine, sleep=leave))
        deploy.apply("--set=sagemaker.instances=2", code=130)
    course.failure = "Alarm tsx-digits-5xx is in ALARM state."
    deploy.apply("--set=sagemaker.instances=2", code=1)
    assert (
        "digits was returned to its previous state: Alarm tsx-digits-5xx is in ALARM state"
        in deploy.err
    )
    assert [call.split()[0] for call in course.calls] == ["CreateEndpoint", "UpdateEndpoint"]


@pytest.mark.parametrize("wrong", [["--set=sagemaker.instnces=2"], ["--nonsense"]])
def test_a_plan_that_was_asked_for_wrongly_is_an_error_and_no_change(
    deploy: Deploy, course: Course, wrong: list[str]
) -> None:
    word = wrong[-1].rpartition("=")[0].rpartition(".")[2] or wrong[-1]
    said = [str(deploy.archive), "--target", "sagemaker", "--name", "digits", *wrong]
    for words, code in (
        (("plan", *said), 1),
        ((*said, "--plan"), 1),
        (tuple(said), 2),
    ):  # 2: wrong usage, as of any other command
        deploy(*words, code=code)
        assert word in deploy.err
    assert course.calls == []


def test_how_somebody_else_scales_an_endpoint_is_left_alone(deploy: Deploy) -> None:
    deploy.apply()
    client = boto3.client("application-autoscaling")
    which = {
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
    client.register_scalable_target(**which, MinCapacity=1, MaxCapacity=7)
    client.put_scaling_policy(
        **which,
        PolicyName="theirs",
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration=rule,
    )
    deploy.plan(code=0)
    deploy.apply()
    kept = client.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert [policy["PolicyName"] for policy in kept] == ["theirs"]
    assert (
        client.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"][0][
            "MaxCapacity"
        ]
        == 7
    )


def test_an_endpoint_that_is_moving_is_not_sent_back_further_than_before(
    deploy: Deploy, course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply()
    deploy.apply("--set=sagemaker.instances=2")
    course.looks = 50

    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(locations, "Engine", partial(engine.Engine, sleep=leave))
        deploy.apply("--set=sagemaker.instances=3", "--canary=10", code=130)
    deploy.verb("rollback", "--yes", code=1)
    assert "digits is Updating, and SageMaker accepts no changes until that ends" in deploy.err


def test_purge_removes_what_was_uploaded_for_versions_that_are_gone_and_no_repository_of_others(
    deploy: Deploy, tmp_path: Path
) -> None:
    deploy.apply("--set=keep=1")
    deploy.archive = make_model(tmp_path / "digits.mar", HANDLER + "# another one\n")
    deploy.apply("--set=keep=1")
    deploy.plan("--set=keep=1", code=0)
    client = boto3.client("ecr")
    client.create_repository(repositoryName="tsx/sagemaker/digits")  # by nobody who deploys
    deploy.verb("destroy", "--purge", "--yes")
    assert "Contents" not in boto3.client("s3").list_objects_v2(
        Bucket="tsx-123456789012-eu-central-1"
    )
    assert len(client.describe_repositories()["repositories"]) == 1


def test_an_asynchronous_endpoint_scales_by_its_backlog_and_down_to_nothing(deploy: Deploy) -> None:
    deploy.apply(
        "--set=sagemaker.asynchronous.output=s3://answers/x",
        "--set=sagemaker.autoscaling.min=0",
    )
    (rule,) = boto3.client("application-autoscaling").describe_scaling_policies(
        ServiceNamespace="sagemaker"
    )["ScalingPolicies"]
    measured = rule["TargetTrackingScalingPolicyConfiguration"]["CustomizedMetricSpecification"]
    assert (measured["MetricName"], measured["Dimensions"]) == (
        "ApproximateBacklogSizePerInstance", [{"Name": "EndpointName", "Value": "digits"}]
    )  # fmt: skip
    deploy.plan(
        "--set=sagemaker.asynchronous.output=s3://answers/x",
        "--set=sagemaker.autoscaling.min=0",
        code=0,
    )


def test_the_server_waits_for_its_model_as_long_as_sagemaker_does() -> None:
    for timeout, variables in (
        ("10m", {}),
        ("1h", {"TSX_DEFAULTS": "default_startup_timeout=3600"}),
    ):
        spec = a_spec("sagemaker", sagemaker={"startup_timeout": timeout})
        made = model_properties(spec, FACTS, "s3://bucket/model.tar.gz")["PrimaryContainer"]
        assert made["Environment"] == {"TSX_TARGET": "sagemaker"} | variables
