"""Inference components: several models that share an endpoint and change independently."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import boto3
import pytest

from tests.kit.deploy import (
    alarms,
    endpoint_config,
    sagemaker,
    sagemaker_resources,
    scalable_targets,
    scaling_policies,
)
from tests.support.deploying import OTHER_IMAGE, ROLE, Deploy, actions
from tests.support.platforms.aws import ACCOUNT, REGION, Scenario
from tests.support.platforms.aws_components import count_failure_without_capacity, scale

SHARED = "--set=sagemaker.component.endpoint=shared"


@pytest.fixture
def member(deploy_to: Callable[..., Deploy]) -> Any:
    """Return a function that makes one of several deployments.

    By default, they are components of the endpoint `shared`.
    """
    return lambda name, *options: deploy_to("sagemaker", *(options or [SHARED]), name=name)


def component(name: str) -> Any:
    return sagemaker().describe_inference_component(InferenceComponentName=name)


def memory_of(name: str) -> Any:
    resources = component(name)["Specification"]["ComputeResourceRequirements"]
    return resources["MinMemoryRequiredInMb"]


def calls(scenario: Scenario) -> list[str]:
    return [call.split()[0] for call in scenario.calls]


def test_the_first_component_creates_the_endpoint_and_others_join_it(
    member: Any, scenario: Scenario
) -> None:
    scenario.polls = 2
    a, b = member("a"), member("b")
    assert set(actions(a.plan(code=2)).values()) == {"create"}
    assert "InService" in a.apply(
        "--set=sagemaker.instance_type=ml.g5.xlarge --set=sagemaker.component.gpus=1"
    )
    a.plan("--set=sagemaker.component.gpus=1", code=0)
    changes = actions(b.plan(code=2))
    assert [changes[id] for id in ("EndpointConfig", "Endpoint", "Component")] == [
        "same",
        "same",
        "create",
    ]
    b.apply("--set=sagemaker.component.copies=2")
    assert calls(scenario) == ["CreateEndpoint", *["CreateInferenceComponent"] * 2]
    config = endpoint_config("shared")
    [variant] = config["ProductionVariants"]
    assert (variant["InstanceType"], config["ExecutionRoleArn"]) == ("ml.g5.xlarge", ROLE)
    assert "ModelName" not in variant
    assert variant["ManagedInstanceScaling"] == {
        "Status": "ENABLED",
        "MinInstanceCount": 0,
        "MaxInstanceCount": 4,
    }
    assert component("a")["Specification"]["ComputeResourceRequirements"] == {
        "NumberOfCpuCoresRequired": 1, "NumberOfAcceleratorDevicesRequired": 1, "MinMemoryRequiredInMb": 2048
    }  # fmt: skip
    status = b.read_json("status")
    assert (status["copies"], status["endpoint"], status["instances"]) == (2, "shared", 1)
    assert status["model name"].startswith("tsx-b-")


def test_a_deployment_changes_only_its_given_endpoint_settings(
    member: Any, scenario: Scenario
) -> None:
    a, b = member("a"), member("b")
    a.apply("--set=sagemaker.instance_type=ml.m5.xlarge")
    b.apply()
    previous_config = endpoint_config("shared")["EndpointConfigName"]
    more = "--set=sagemaker.component.max_instances=8"
    planned = b.plan(more, code=2)
    (finding,) = planned["findings"]
    assert finding["text"].endswith("ManagedInstanceScaling.MaxInstanceCount 4 -> 8")
    assert actions(planned) == {
        "Bucket": "same", "ModelData": "same", "Model": "same", "EndpointConfig": "create", "Endpoint": "update",
        "LogGroup": "same", "Component": "same",
        "EndpointConfig0": "delete",
    }  # fmt: skip
    requests: list[str] = []
    scenario.before = lambda operation, request: requests.append(request)
    b.apply(more)
    [variant] = endpoint_config("shared")["ProductionVariants"]
    assert variant["InstanceType"] == "ml.m5.xlarge"
    assert variant["ManagedInstanceScaling"]["MaxInstanceCount"] == 8
    [update] = [call for call in requests if call.startswith("sagemaker:UpdateEndpoint")]
    # The instances that run the copies are kept.
    assert '"RetainAllVariantProperties": true' in update
    configs = sagemaker().list_endpoint_configs()["EndpointConfigs"]
    assert previous_config not in [config["EndpointConfigName"] for config in configs]
    a.plan(code=0)


def test_a_deployment_waits_for_changes_by_another_one(member: Any, scenario: Scenario) -> None:
    a, b = member("a"), member("b")
    a.apply()
    config = endpoint_config("shared")
    [variant] = config["ProductionVariants"]
    variant["ManagedInstanceScaling"]["MaxInstanceCount"] = 7
    sagemaker().create_endpoint_config(
        EndpointConfigName="coming", ProductionVariants=[variant], ExecutionRoleArn=ROLE
    )
    scenario.polls = 9
    sagemaker().update_endpoint(EndpointName="shared", EndpointConfigName="coming")
    b.apply()
    [variant] = endpoint_config("shared")["ProductionVariants"]
    assert variant["ManagedInstanceScaling"]["MaxInstanceCount"] == 7


def test_a_component_is_refused_while_its_endpoint_is_deleted(member: Any) -> None:
    # The import is inside the test, since it takes a second.
    from moto.sagemaker.models import sagemaker_backends

    member("a").apply()
    sagemaker_backends[ACCOUNT][REGION].endpoints["shared"].endpoint_status = "Deleting"
    b = member("b")
    b.apply(code=1)
    assert "deploy again when it is gone" in b.err


def test_updates_and_rollbacks_do_not_change_other_components(
    member: Any, scenario: Scenario
) -> None:
    a, b = member("a"), member("b")
    a.apply()
    b.apply()
    component_before = component("b")
    scenario.calls.clear()
    more = "--set=sagemaker.component.memory=1048576 --set=sagemaker.component.copies=3"
    a.apply("--image", OTHER_IMAGE, more)
    assert memory_of("a") == 1 << 20
    assert scenario.calls == ["UpdateInferenceComponent a"]
    assert a.versions == [(1, False), (2, True)]
    first = a.read_json("history")[0]["id"]
    a.verb("rollback", "--yes")
    assert component("a")["Specification"]["ModelName"] == first
    # The version has its memory; the number of copies belongs to no version.
    assert memory_of("a") == 2048
    assert component("a")["RuntimeConfig"]["DesiredCopyCount"] == 3
    assert component("b")["Specification"] == component_before["Specification"]
    a.verb("promote", "--yes", code=1)
    assert "replaces the copies of a by itself" in a.err
    a.apply("--set=sagemaker.component.memory=3000 --set=keep=1")
    assert len(a.versions) == 1


def test_a_component_scales_to_zero_and_a_request_wakes_it(member: Any) -> None:
    a = member("a")

    def running() -> tuple[int, int]:
        status = a.read_json("status")
        return status["copies"], status["instances"]

    arguments = "--set=sagemaker.autoscaling.min=0 --set=sagemaker.autoscaling.max=3"
    a.apply(arguments)
    assert component("a")["RuntimeConfig"]["DesiredCopyCount"] == 1
    scale("a", 0)
    assert running() == (0, 0)
    # Scaling changes the number of copies, which is not a difference.
    a.plan(arguments, code=0)
    count_failure_without_capacity("a")
    assert running() == (1, 1)
    # The minimum number of copies is one again.
    a.apply("--set=sagemaker.autoscaling.max=3")
    (policy,) = scaling_policies("sagemaker")
    assert policy["PolicyType"] == "TargetTrackingScaling"
    assert not alarms()
    a.apply()
    assert not scalable_targets("sagemaker")


def test_a_canary_of_a_component_is_a_rolling_update(member: Any, scenario: Scenario) -> None:
    a = member("a")
    canary = (
        "--canary=25% --bake=2m --alarm=5xx>0 --alarm=p95>300ms --set=sagemaker.component.copies=4"
    )
    a.apply(canary)
    names = [alarm["AlarmName"] for alarm in alarms()]
    for alarm in alarms():
        assert alarm["Dimensions"] == [{"Name": "InferenceComponentName", "Value": "a"}]
    scenario.failure = "Alarm tsx-a-5xx-0 is in ALARM state."
    a.apply(canary, "--image", OTHER_IMAGE, code=1)
    assert "a was returned to its previous state" in a.err
    assert scenario.components["a"].deployment == {
        "RollingUpdatePolicy": {
            "MaximumBatchSize": {"Type": "CAPACITY_PERCENT", "Value": 25},
            "WaitIntervalInSeconds": 120,
            "MaximumExecutionTimeoutInSeconds": 28800,
        },
        "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": name} for name in names]},
    }
    # SageMaker may omit the reason.
    scenario.failure = " "
    scenario.calls.clear()
    a.apply(canary, "--image", OTHER_IMAGE, "--set=sagemaker.component.copies=5", code=1)
    assert "a was returned to its previous state" in a.err
    assert scenario.calls == ["UpdateInferenceComponent a"]
    scenario.failure, scenario.polls = "", 20
    sagemaker().update_inference_component(
        InferenceComponentName="a", Specification=component("a")["Specification"]
    )
    a.verb("rollback", "--version=1", "--yes", code=1)
    assert "accepts no changes until that ends" in a.err


def test_the_endpoint_is_removed_with_its_last_component(member: Any, scenario: Scenario) -> None:
    a, b = member("a"), member("b")
    a.apply("--set=sagemaker.autoscaling.min=0")
    b.apply()
    scenario.calls.clear()
    a.verb("destroy", "--purge", "--yes")
    assert scenario.calls == ["DeleteInferenceComponent a"]
    b.plan(code=0)
    removed = json.loads(b.verb("destroy", "--purge --yes --json"))["changes"]
    assert [change["kind"].rpartition("::")[2] for change in removed] == [
        "InferenceComponent",
        "Endpoint",
        "EndpointConfig",
        "Model",
        "Object",
        "LogGroup",
    ]
    assert not sagemaker_resources()
    assert not alarms()
    b.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'b'" in b.err


def test_a_later_purge_removes_the_log_of_a_component(member: Any) -> None:
    a = member("a")
    a.apply()
    a.verb("destroy", "--yes")
    logs = boto3.client("logs")
    # This log group is foreign.
    logs.create_log_group(logGroupName="/aws/sagemaker/InferenceComponents/b")
    a.verb("destroy", "--purge", "--yes")
    member("b").verb("destroy", "--purge", "--yes", code=1)
    (group,) = logs.describe_log_groups()["logGroups"]
    assert group["logGroupName"] == "/aws/sagemaker/InferenceComponents/b"


def test_a_changing_component_is_removed_after_the_change(member: Any, scenario: Scenario) -> None:
    a = member("a")
    a.apply()
    scenario.polls = 3
    sagemaker().update_inference_component_runtime_config(
        InferenceComponentName="a", DesiredRuntimeConfig={"CopyCount": 2}
    )
    a.verb("destroy", "--yes")
    assert scenario.components == {}


def test_a_failed_start_has_a_reason_and_destroy_cleans_up(member: Any, scenario: Scenario) -> None:
    a = member("a")
    scenario.failure = "The primary container did not pass the ping health check."
    # The empty endpoint does not start.
    a.apply(code=1)
    assert "did not pass the ping health check" in a.err
    a.verb("destroy", "--yes")
    assert not sagemaker_resources()
    scenario.failure = ""
    a.apply()
    scenario.failure = "The container did not pass the ping health check."
    b = member("b")
    logs, group = boto3.client("logs"), "/aws/sagemaker/InferenceComponents/b"
    logs.create_log_group(logGroupName=group)
    logs.create_log_stream(logGroupName=group, logStreamName="x")
    line = {"timestamp": round(time.time() * 1000) + 60_000, "message": "CUDA out of memory"}
    logs.put_log_events(logGroupName=group, logStreamName="x", logEvents=[line])
    b.apply(code=1)
    assert "b has failed: The container did not pass" in b.err
    assert "The last 1 lines of" in b.err
    assert "GPU's memory is too small" in b.err
    scenario.failure = ""
    assert actions(b.plan(code=2))["Component"] == "replace"
    b.apply()


def test_a_foreign_endpoint_is_used_but_not_changed(member: Any) -> None:
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
    assert "did not create it for several components" in a.err
    unmanaged_endpoint = "--set=sagemaker.component.manage_endpoint=false"
    assert set(actions(a.plan(unmanaged_endpoint, code=2))) == {
        "Bucket",
        "ModelData",
        "Model",
        "LogGroup",
        "Component",
    }
    a.apply(unmanaged_endpoint)
    assert component("a")["VariantName"] == "main"
    a.plan(unmanaged_endpoint, code=0)
    a.verb("destroy", "--yes")
    assert endpoint_config("shared")["EndpointConfigName"] == "theirs"
    sagemaker().create_endpoint(EndpointName="Their--Endpoint", EndpointConfigName="theirs")
    sagemaker().describe_endpoint(EndpointName="Their--Endpoint")
    b = member("b", unmanaged_endpoint, "--set=sagemaker.component.endpoint=Their--Endpoint")
    b.apply()
    assert component("b")["EndpointName"] == "Their--Endpoint"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--set=sagemaker.serverless.memory=2048", "endpoints with one model only"),
        ("--create-role", "shared is the endpoint of several"),
        ("--canary=10", "copies is 1. Set it to 2 or more"),
        ("--canary=3 --set=sagemaker.component.copies=40", "SageMaker replaces 5 to 50 %"),
        ("--canary=5 --bake=1h --set=sagemaker.component.copies=40", "after each of 20 steps"),
        ("--set=sagemaker.component.gpus=1", "ml.c6i.xlarge has none"),
        ("--set=sagemaker.component.min_instances=9", "is 9, and max_instances is 4"),
        ("--set=sagemaker.multi_model.endpoint=b", "two ways to share an endpoint"),
        ("--set=sagemaker.component.variant=main", "sagemaker.component.variant is main"),
        ("--set=sagemaker.component.endpoint=Shared", "a name has up to 40 lower-case letters"),
    ],
)
def test_unsupported_options_of_a_component_are_refused(
    member: Any, scenario: Scenario, arguments: str, error: str
) -> None:
    a = member("a")
    a.apply(arguments, code=2)
    assert error in a.err
    assert scenario.calls == []


def test_a_deployment_cannot_move_to_another_endpoint_or_kind(member: Any) -> None:
    def failure(name: str, *options: str) -> str:
        deploy = member(name, *options)
        deploy.apply(code=1)
        return str(deploy.err)

    single = "--set=sagemaker.instances=1"
    elsewhere = "--set=sagemaker.component.endpoint=other"
    member("a").apply()
    member("single", single).apply()
    for options, current, expected_error in (
        (["a", elsewhere], "a component of endpoint 'shared'", "a component of endpoint 'other'"),
        (["a", single], "a component of endpoint 'shared'", "an endpoint of its own"),
        (["single"], "an endpoint of its own", "a component of endpoint 'shared'"),
    ):
        error = failure(*options)
        assert f"{options[0]} is {current} now" in error
        assert f"the specification asks for {expected_error}" in error
    single_model = failure("c", "--set=sagemaker.component.endpoint=single")
    assert "did not create it for several components" in single_model
    unmanaged = "--set=sagemaker.component.manage_endpoint=false"
    absent = failure("c", "--set=sagemaker.component.endpoint=x", unmanaged)
    assert "there is no endpoint 'x'" in absent
