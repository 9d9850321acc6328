"""Inference components: two models share an endpoint, each with versions, copies and an end of its
own.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.deploying import OTHER_IMAGE, ROLE, Deploy, actions
from tests.support.platforms.aws import ACCOUNT, REGION, Course
from tests.support.platforms.aws_components import count_failure_without_capacity, scale

pytestmark = pytest.mark.slow

SHARED = ("--set=sagemaker.component.endpoint=shared",)


@pytest.fixture
def member(archive: Path, course: Course, capsys: pytest.CaptureFixture[str]) -> Any:
    """One of several deployments."""
    return lambda name, *always: Deploy(archive, "sagemaker", capsys, always or SHARED, name)


def sagemaker() -> Any:
    return boto3.client("sagemaker")


def component(name: str) -> Any:
    return sagemaker().describe_inference_component(InferenceComponentName=name)


def endpoint_config() -> Any:
    name = sagemaker().describe_endpoint(EndpointName="shared")["EndpointConfigName"]
    return sagemaker().describe_endpoint_config(EndpointConfigName=name)


def calls(course: Course) -> list[str]:
    return [call.split()[0] for call in course.calls]


def test_the_first_component_brings_its_endpoint_and_others_join_it(
    member: Any, course: Course
) -> None:
    course.looks = 2
    a, b = member("a"), member("b")
    assert set(actions(a.plan(code=2)).values()) == {"create"}
    assert "InService" in a.apply(
        "--set=sagemaker.instance_type=ml.g5.xlarge", "--set=sagemaker.component.gpus=1"
    )
    assert set(actions(a.plan("--set=sagemaker.component.gpus=1", code=0)).values()) == {"same"}
    joined = actions(b.plan(code=2))
    assert (joined["EndpointConfig"], joined["Endpoint"], joined["Component"]) == (
        "same",
        "same",
        "create",
    )
    b.apply("--set=sagemaker.component.copies=2")
    assert calls(course) == [
        "CreateEndpoint",
        "CreateInferenceComponent",
        "CreateInferenceComponent",
    ]
    [variant] = endpoint_config()["ProductionVariants"]
    assert (
        variant["InstanceType"],
        endpoint_config()["ExecutionRoleArn"],
        "ModelName" in variant,
    ) == ("ml.g5.xlarge", ROLE, False)
    assert variant["ManagedInstanceScaling"] == {
        "Status": "ENABLED",
        "MinInstanceCount": 0,
        "MaxInstanceCount": 4,
    }
    assert component("a")["Specification"]["ComputeResourceRequirements"] == {
        "NumberOfCpuCoresRequired": 1, "NumberOfAcceleratorDevicesRequired": 1, "MinMemoryRequiredInMb": 2048
    }  # fmt: skip
    status = b.reported("status")
    assert (status["copies"], status["endpoint"], status["instances"], status["status"]) == (
        2,
        "shared",
        1,
        "InService",
    )
    assert status["model name"].startswith("tsx-b-")


def test_a_deployment_changes_those_settings_of_the_endpoint_that_it_names_and_no_others(
    member: Any, course: Course
) -> None:
    a, b = member("a"), member("b")
    a.apply("--set=sagemaker.instance_type=ml.m5.xlarge")
    b.apply()
    before = endpoint_config()["EndpointConfigName"]
    more = ("--set=sagemaker.component.max_instances=8",)
    planned = b.plan(*more, code=2)
    change = "the endpoint shared changes for all components on it: ManagedInstanceScaling.MaxInstanceCount 4 -> 8"
    assert [each["text"] for each in planned["findings"]] == [change]
    assert actions(planned) == {
        "Bucket": "same", "ModelData": "same", "Model": "same", "EndpointConfig": "create", "Endpoint": "update",
        "LogGroup": "same", "Component": "same",
        "EndpointConfig0": "delete",
    }  # fmt: skip
    requests: list[str] = []
    course.before = lambda operation, said: requests.append(said)
    b.apply(*more)
    [variant] = endpoint_config()["ProductionVariants"]
    assert (variant["InstanceType"], variant["ManagedInstanceScaling"]["MaxInstanceCount"]) == (
        "ml.m5.xlarge",
        8,
    )
    [update] = [each for each in requests if each.startswith("sagemaker:UpdateEndpoint")]
    assert (
        '"RetainAllVariantProperties": true' in update
    )  # the instances that run for the copies stay
    assert before not in [
        each["EndpointConfigName"]
        for each in sagemaker().list_endpoint_configs()["EndpointConfigs"]
    ]
    assert set(actions(a.plan(code=0)).values()) == {"same"}


def test_a_change_of_the_endpoint_by_another_deployment_is_waited_for(
    member: Any, course: Course
) -> None:
    a, b = member("a"), member("b")
    a.apply()
    config = endpoint_config()
    [variant] = config["ProductionVariants"]
    variant["ManagedInstanceScaling"]["MaxInstanceCount"] = 7
    sagemaker().create_endpoint_config(
        EndpointConfigName="coming", ProductionVariants=[variant], ExecutionRoleArn=ROLE
    )
    course.looks = 9
    sagemaker().update_endpoint(EndpointName="shared", EndpointConfigName="coming")
    b.apply()
    [variant] = endpoint_config()["ProductionVariants"]
    assert variant["ManagedInstanceScaling"]["MaxInstanceCount"] == 7


def test_an_endpoint_that_is_being_deleted_takes_no_component(member: Any) -> None:
    from moto.sagemaker.models import sagemaker_backends  # here, as it takes a second to import

    member("a").apply()
    sagemaker_backends[ACCOUNT][REGION].endpoints["shared"].endpoint_status = "Deleting"
    b = member("b")
    b.apply(code=1)
    assert "the endpoint shared is being deleted: deploy again when it is gone" in b.err


def test_an_update_and_a_rollback_of_one_component_leave_the_other_as_it_is(
    member: Any, course: Course
) -> None:
    a, b = member("a"), member("b")
    a.apply()
    b.apply()
    there = component("b")
    course.calls.clear()
    a.apply(
        "--image",
        OTHER_IMAGE,
        "--set=sagemaker.component.memory=1048576",
        "--set=sagemaker.component.copies=3",
    )
    assert (
        component("a")["Specification"]["ComputeResourceRequirements"]["MinMemoryRequiredInMb"]
        == 1 << 20
    )
    assert course.calls == ["UpdateInferenceComponent a"]
    versions = a.reported("history")
    assert [(each["number"], each["is_current"]) for each in versions] == [(1, False), (2, True)]
    a.verb("rollback", "--yes")
    now = component("a")
    assert now["Specification"]["ModelName"] == versions[0]["id"]
    assert (
        now["Specification"]["ComputeResourceRequirements"]["MinMemoryRequiredInMb"] == 2048
    )  # of that version
    assert now["RuntimeConfig"]["DesiredCopyCount"] == 3
    assert component("b")["Specification"] == there["Specification"]
    a.verb("promote", "--yes", code=1)
    assert "SageMaker replaces the copies of a by itself" in a.err
    a.apply("--set=sagemaker.component.memory=3000", "--set=keep=1")
    assert len(a.reported("history")) == 1


def test_a_component_scales_to_zero_and_a_request_that_finds_no_copy_wakes_it(member: Any) -> None:
    a = member("a")
    words = ("--set=sagemaker.autoscaling.min=0", "--set=sagemaker.autoscaling.max=3")
    a.apply(*words)
    assert component("a")["RuntimeConfig"]["DesiredCopyCount"] == 1  # to begin with
    scale("a", 0)  # when no requests come
    assert (a.reported("status")["copies"], a.reported("status")["instances"]) == (0, 0)
    a.plan(*words, code=0)  # how many there are is decided by the scaling
    count_failure_without_capacity("a")
    assert (a.reported("status")["copies"], a.reported("status")["instances"]) == (1, 1)
    a.apply("--set=sagemaker.autoscaling.max=3")  # never less than one
    scaling = boto3.client("application-autoscaling")
    assert [
        each["PolicyType"]
        for each in scaling.describe_scaling_policies(ServiceNamespace="sagemaker")[
            "ScalingPolicies"
        ]
    ] == ["TargetTrackingScaling"]
    assert not boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    a.apply()
    assert not scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]


def test_a_canary_of_a_component_is_a_rolling_update_that_alarms_take_back(
    member: Any, course: Course
) -> None:
    a = member("a")
    canary = (
        "--canary=25%",
        "--bake=2m",
        "--alarm=5xx>0",
        "--alarm=p95>300ms",
        "--set=sagemaker.component.copies=4",
    )
    a.apply(*canary)
    alarms = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert all(
        each["Dimensions"] == [{"Name": "InferenceComponentName", "Value": "a"}] for each in alarms
    )
    course.failure = "Alarm tsx-a-5xx-0 is in ALARM state."
    a.apply(*canary, "--image", OTHER_IMAGE, code=1)
    assert "a was returned to its previous state: Alarm tsx-a-5xx-0 is in ALARM state" in a.err
    assert course.components["a"].deployment == {
        "RollingUpdatePolicy": {
            "MaximumBatchSize": {"Type": "CAPACITY_PERCENT", "Value": 25},
            "WaitIntervalInSeconds": 120,
            "MaximumExecutionTimeoutInSeconds": 28800,
        },
        "AutoRollbackConfiguration": {
            "Alarms": [{"AlarmName": each["AlarmName"]} for each in alarms]
        },
    }
    course.failure = " "  # SageMaker need not give a reason
    course.calls.clear()
    a.apply(*canary, "--image", OTHER_IMAGE, "--set=sagemaker.component.copies=5", code=1)
    assert "a was returned to its previous state" in a.err
    assert course.calls == ["UpdateInferenceComponent a"]
    course.failure, course.looks = "", 20
    sagemaker().update_inference_component(
        InferenceComponentName="a", Specification=component("a")["Specification"]
    )
    a.verb("rollback", "--version=1", "--yes", code=1)
    assert "a is Updating, and SageMaker accepts no changes until that ends" in a.err


def test_the_endpoint_goes_with_its_last_component_and_not_before(
    member: Any, course: Course
) -> None:
    a, b = member("a"), member("b")
    a.apply("--set=sagemaker.autoscaling.min=0")
    b.apply()
    course.calls.clear()
    a.verb("destroy", "--purge", "--yes")
    assert course.calls == ["DeleteInferenceComponent a"]
    assert set(actions(b.plan(code=0)).values()) == {"same"}
    removed = json.loads(b.verb("destroy", "--purge", "--yes", "--json"))["changes"]
    assert [each["kind"].rpartition("::")[2] for each in removed] == [
        "InferenceComponent",
        "Endpoint",
        "EndpointConfig",
        "Model",
        "Object",
        "LogGroup",
    ]
    assert not [
        *sagemaker().list_models()["Models"],
        *sagemaker().list_endpoint_configs()["EndpointConfigs"],
    ]
    assert not sagemaker().list_endpoints()["Endpoints"]
    assert not boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    b.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'b' in eu-central-1" in b.err


def test_the_log_of_a_component_is_removed_by_a_purge_afterwards(member: Any) -> None:
    a = member("a")
    a.apply()
    a.verb("destroy", "--yes")
    logs = boto3.client("logs")
    logs.create_log_group(logGroupName="/aws/sagemaker/InferenceComponents/b")  # of somebody else
    a.verb("destroy", "--purge", "--yes")
    member("b").verb("destroy", "--purge", "--yes", code=1)
    assert [each["logGroupName"] for each in logs.describe_log_groups()["logGroups"]] == [
        "/aws/sagemaker/InferenceComponents/b"
    ]


def test_a_component_that_changes_is_removed_once_that_has_ended(
    member: Any, course: Course
) -> None:
    a = member("a")
    a.apply()
    course.looks = 3
    sagemaker().update_inference_component_runtime_config(
        InferenceComponentName="a", DesiredRuntimeConfig={"CopyCount": 2}
    )
    a.verb("destroy", "--yes")
    assert course.components == {}


def test_a_start_that_fails_says_why_and_leaves_nothing_that_destroy_does_not_find(
    member: Any, course: Course
) -> None:
    a = member("a")
    course.failure = "The primary container did not pass the ping health check."
    a.apply(code=1)  # the endpoint's, which is empty
    assert "did not pass the ping health check" in a.err
    a.verb("destroy", "--yes")
    assert not sagemaker().list_endpoints()["Endpoints"]
    course.failure = ""
    a.apply()
    course.failure = "The container did not pass the ping health check."
    b = member("b")
    logs, group = boto3.client("logs"), "/aws/sagemaker/InferenceComponents/b"
    logs.create_log_group(logGroupName=group)
    logs.create_log_stream(logGroupName=group, logStreamName="x")
    line = {"timestamp": round(time.time() * 1000) + 60_000, "message": "CUDA out of memory"}
    logs.put_log_events(logGroupName=group, logStreamName="x", logEvents=[line])
    b.apply(code=1)
    assert "b has failed: The container did not pass the ping health check" in b.err
    assert "The last 1 lines of /aws/sagemaker/InferenceComponents/b" in b.err
    assert "the GPU's memory is too small" in b.err.replace("The GPU's", "the GPU's")
    course.failure = ""
    assert actions(b.plan(code=2))["Component"] == "replace"
    b.apply()


def test_an_endpoint_of_somebody_else_is_used_and_neither_changed_nor_removed(member: Any) -> None:
    variant = {
        "VariantName": "main", "InstanceType": "ml.g5.xlarge", "InitialInstanceCount": 1,
        "ManagedInstanceScaling": {"Status": "ENABLED", "MinInstanceCount": 1, "MaxInstanceCount": 2},
    }  # fmt: skip
    sagemaker().create_endpoint_config(
        EndpointConfigName="theirs", ProductionVariants=[variant], ExecutionRoleArn=ROLE
    )
    sagemaker().create_endpoint(EndpointName="shared", EndpointConfigName="theirs")
    sagemaker().describe_endpoint(EndpointName="shared")
    a = member("a")
    a.apply(code=1)
    assert (
        "the endpoint shared already exists, and tsx deploy did not create it for several components"
        in a.err
    )
    theirs = ("--set=sagemaker.component.manage_endpoint=false",)
    assert set(actions(a.plan(*theirs, code=2))) == {
        "Bucket",
        "ModelData",
        "Model",
        "LogGroup",
        "Component",
    }
    a.apply(*theirs)
    assert component("a")["VariantName"] == "main"
    a.plan(*theirs, code=0)
    a.verb("destroy", "--yes")
    assert sagemaker().describe_endpoint(EndpointName="shared")["EndpointConfigName"] == "theirs"
    sagemaker().create_endpoint(EndpointName="Their--Endpoint", EndpointConfigName="theirs")
    sagemaker().describe_endpoint(EndpointName="Their--Endpoint")
    b = member("b", *theirs, "--set=sagemaker.component.endpoint=Their--Endpoint")
    b.apply()
    assert component("b")["EndpointName"] == "Their--Endpoint"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--set=sagemaker.serverless.memory=2048"],
            "sagemaker.serverless: SageMaker offers that for endpoints with one model only",
        ),
        (
            ["--create-role"],
            "create_role: the role of a deployment is removed with it, and shared is the endpoint of several",
        ),
        (["--canary=10"], "sagemaker.component.copies is 1. Set it to 2 or more"),
        (
            ["--canary=3", "--set=sagemaker.component.copies=40"],
            "--canary 3%: SageMaker replaces 5 to 50 %",
        ),
        (
            ["--canary=5", "--bake=1h", "--set=sagemaker.component.copies=40"],
            "after each of 20 steps, and allows 8 hours",
        ),
        (
            ["--set=sagemaker.component.gpus=1"],
            "sagemaker.component.gpus is 1, and ml.c6i.xlarge has none",
        ),
        (
            ["--set=sagemaker.component.min_instances=9"],
            "min_instances is 9, and max_instances is 4",
        ),
        (
            ["--set=sagemaker.multi_model.endpoint=b"],
            "are two ways to share an endpoint: remove one of them",
        ),
        (["--set=sagemaker.component.variant=main"], "sagemaker.component.variant is main"),
        (
            ["--set=sagemaker.component.endpoint=Shared"],
            "a name has up to 40 lower-case letters",
        ),
    ],
)
def test_what_a_component_does_not_have_is_refused(
    member: Any, course: Course, words: list[str], said: str
) -> None:
    a = member("a")
    a.apply(*words, code=2)
    assert said in a.err
    assert course.calls == []


def test_a_deployment_does_not_move_to_another_endpoint_or_form(member: Any) -> None:
    member("a").apply()
    single = ("--set=sagemaker.instances=1",)
    forms = {
        ("--set=sagemaker.component.endpoint=other",): "a component of endpoint 'other'",
        single: "an endpoint of its own",
    }
    for words, asked in forms.items():
        other = member("a", *words)
        other.apply(code=1)
        assert (
            f"a is a component of endpoint 'shared' now, and the specification asks for {asked}"
            in other.err
        )
    own = member("single", *single)
    own.apply()
    into = member("single")
    into.apply(code=1)
    assert (
        "single is an endpoint of its own now, and the specification asks for a component of endpoint 'shared'"
        in into.err
    )
    joined = member("c", "--set=sagemaker.component.endpoint=single")
    joined.apply(code=1)
    assert (
        "the endpoint single already exists, and tsx deploy did not create it for several components"
        in joined.err
    )
    absent = member(
        "c",
        "--set=sagemaker.component.endpoint=x",
        "--set=sagemaker.component.manage_endpoint=false",
    )
    absent.apply(code=1)
    assert "there is no endpoint 'x' in eu-central-1" in absent.err
