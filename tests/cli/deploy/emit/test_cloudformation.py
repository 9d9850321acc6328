"""CloudFormation templates of `tsx deploy`: resource names, stack outputs, and canaries."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.support.deploying import FACTS, LOCAL, a_spec
from tsx_cli.deploy.emit.render import EmittedFiles, emit

ROLE = "arn:aws:iam::123456789012:role/endpoint"


def emitted(target: str, **more: Any) -> EmittedFiles:
    return emit("cloudformation", a_spec(target, **{target: {"role": ROLE}, **more}), FACTS, LOCAL)


def template(target: str, **more: Any) -> Any:
    return yaml.safe_load(emitted(target, **more).files["template.yaml"])


MANAGED = {"subnets": "subnet-1", "operator_role": ROLE}
SCALED = {"autoscaling": {"max": 3}}


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("sagemaker", {"canary": {}, "create_role": True, "sagemaker": SCALED}),
        ("lambda", {"canary": {}, "create_role": True, "lambda": SCALED}),
        ("lambda", {"lambda": {"role": ROLE, "managed_instances": MANAGED}}),
    ],
)
def test_no_resource_that_may_be_replaced_has_a_fixed_name(
    target: str, more: dict[str, Any]
) -> None:
    """CloudFormation creates the replacement while the old resource still has the name."""
    schemas = pytest.importorskip("cfnlint.schema.manager").PROVIDER_SCHEMA_MANAGER
    never_change = {"PackageType", "ServiceNamespace", "ResourceId", "ScalableDimension"}
    for id, resource in template(target, **more)["Resources"].items():
        schema = schemas.get_resource_schema("eu-central-1", resource["Type"]).schema
        fixed = {path.rpartition("/")[2] for path in schema.get("createOnlyProperties", [])}
        replacing = fixed & resource["Properties"].keys() - never_change
        names = {f"{resource['Type'].rpartition('::')[2]}Name", "PolicyName"} & replacing
        assert not names or replacing == names, id


@pytest.mark.parametrize(
    ("target", "more", "outputs"),
    [
        ("sagemaker", {}, {"EndpointName", "EndpointArn", "EndpointConfigName", "ModelName", "LogGroup"}),
        ("sagemaker", {"sagemaker": {"component": {"endpoint": "theirs", "manage_endpoint": False}}},
         {"InferenceComponentArn", "ModelName", "LogGroup"}),
        ("lambda", {}, {"FunctionName", "FunctionArn", "Version", "AliasArn", "Url", "LogGroup"}),
        ("lambda", {"lambda": {"url": "off"}, "create_role": True, "log_retention": 0},
         {"FunctionName", "FunctionArn", "Version", "AliasArn", "RoleArn"}),
        ("lambda", {"canary": {}}, {"FunctionName", "FunctionArn", "Version", "AliasArn", "Url", "LogGroup", "CanaryGroup"}),
    ],
)  # fmt: skip
def test_a_stacks_outputs_name_its_resources(
    target: str, more: dict[str, Any], outputs: set[str]
) -> None:
    stack = template(target, **more)
    assert set(stack["Outputs"]) == outputs
    for output in stack["Outputs"].values():
        ((function, argument),) = output["Value"].items()
        assert (argument if function == "Ref" else argument[0]) in stack["Resources"]


def test_a_stack_gets_a_valid_name() -> None:
    assert "--stack-name digits," in emitted("lambda").next_step
    assert "--stack-name tsx-9digits," in emitted("lambda", name="9digits").next_step


@pytest.mark.parametrize("target", ["lambda", "sagemaker"])
def test_the_next_step_begins_with_the_image_unless_one_is_given(target: str) -> None:
    build = f"`tsx deploy digits.mar --target {target} --emit dockerfile`"
    assert build in emitted(target).next_step
    assert "then aws cloudformation deploy" in emitted(target).next_step
    image = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/digits@sha256:" + 64 * "a"
    assert emitted(target, image=image).next_step.startswith("aws cloudformation deploy")


def test_codedeploy_shifts_requests_according_to_the_canary() -> None:
    canary = {"percent": 20, "bake": "90s", "alarms": ["5xx>0", "theirs"]}
    resources = template("lambda", canary=canary)["Resources"]
    assert resources["Alias"]["UpdatePolicy"]["CodeDeployLambdaAliasUpdate"] == {
        "ApplicationName": {"Ref": "CanaryApplication"}, "DeploymentGroupName": {"Ref": "CanaryGroup"}
    }  # fmt: skip
    shift = resources["CanaryShift"]["Properties"]["TrafficRoutingConfig"]
    assert shift == {
        "Type": "TimeBasedCanary",
        "TimeBasedCanary": {"CanaryPercentage": 20, "CanaryInterval": 2},
    }
    group = resources["CanaryGroup"]["Properties"]
    assert group["AlarmConfiguration"] == {
        "Enabled": True,
        "Alarms": [{"Name": {"Ref": "Alarm1"}}, {"Name": "theirs"}],
    }
    assert "DEPLOYMENT_STOP_ON_ALARM" in group["AutoRollbackConfiguration"]["Events"]
    # The stack creates a named role for CodeDeploy, which needs this capability.
    assert "CAPABILITY_NAMED_IAM" in emitted("lambda", canary=canary).next_step
    assert "CAPABILITY_NAMED_IAM" not in emitted("lambda").next_step
    resources = template("sagemaker", canary=canary)["Resources"]
    assert not [id for id in resources if id.startswith("Canary")]
