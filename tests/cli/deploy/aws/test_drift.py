"""Manual changes in AWS: a plan shows them, and applying it reverts them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import boto3
import pytest

from tests.kit.deploy import endpoint_config, sagemaker
from tests.support.deploying import Deploy, actions
from tests.support.platforms.aws_lambda import make_role

NETWORK = {"SubnetIds": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}


@pytest.fixture
def deploy(deploy_to: Callable[..., Deploy]) -> Deploy:
    make_role()
    return deploy_to("lambda")


def change(**settings: Any) -> None:
    """Change the function by hand."""
    boto3.client("lambda").update_function_configuration(FunctionName="digits", **settings)


def function() -> Any:
    return boto3.client("lambda").get_function_configuration(FunctionName="digits")


def publish_layer() -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("more.py", "")
    arn: str = boto3.client("lambda").publish_layer_version(
        LayerName="theirs", Content={"ZipFile": file.getvalue()}
    )["LayerVersionArn"]
    return arn


def differences(deploy: Deploy, *arguments: str) -> dict[str, Any]:
    """Return the differences that a plan shows, all of which belong to the function."""
    changes = deploy.plan(*arguments, code=2)["changes"]
    (change,) = (change for change in changes if change["action"] != "same")
    assert change["id"] == "Function"
    return {field["path"]: (field["old"], field["new"]) for field in change["fields"]}


@pytest.mark.parametrize("arguments", ["", "--set=env.LEVEL=low"])
def test_manual_changes_of_variables_are_reverted(deploy: Deploy, arguments: str) -> None:
    deploy.apply(arguments)
    variables = {"LEVEL": "high", "MORE": "1", "API_TOKEN": "secret"}
    change(Environment={"Variables": variables})
    assert differences(deploy, arguments) == {
        "Environment.Variables.LEVEL": ("high", "low" if arguments else None),
        "Environment.Variables.MORE": ("1", None),
        "Environment.Variables.API_TOKEN": ("(hidden)", None),
    }
    assert "MORE: 1 -> nothing" in deploy.apply(arguments)
    remaining_variables = function().get("Environment", {}).get("Variables", {})
    assert remaining_variables == ({"LEVEL": "low"} if arguments else {})
    deploy.plan(arguments, code=0)


def test_manual_changes_of_the_network_are_reverted(deploy: Deploy) -> None:
    arguments = "--set=lambda.subnets=subnet-2,subnet-1 --set=lambda.security_groups=sg-1"
    deploy.apply()
    change(VpcConfig=NETWORK)
    assert differences(deploy) == {
        f"VpcConfig.{key}": (value, None) for key, value in NETWORK.items()
    }
    deploy.apply()
    assert not function()["VpcConfig"].get("SubnetIds")
    deploy.apply(arguments)
    groups = ["sg-1", "sg-2"]
    change(VpcConfig={**NETWORK, "SecurityGroupIds": groups})
    assert differences(deploy, arguments) == {"VpcConfig.SecurityGroupIds": (groups, ["sg-1"])}
    change(VpcConfig={"SubnetIds": [], "SecurityGroupIds": []})
    assert differences(deploy, arguments) == {
        f"VpcConfig.{key}": (None, value) for key, value in NETWORK.items()
    }
    deploy.apply(arguments)
    deploy.plan(arguments, code=0)


def test_a_manually_added_layer_is_removed(deploy: Deploy) -> None:
    deploy.apply()
    arn = publish_layer()
    change(Layers=[arn])
    assert differences(deploy) == {"Layers": ([arn], None)}
    deploy.apply()
    assert not function().get("Layers")
    deploy.plan(code=0)


def test_a_manually_published_version_does_not_belong_to_the_deployment(
    deploy: Deploy,
) -> None:
    deploy.apply()
    client = boto3.client("lambda")
    change(Environment={"Variables": {"MORE": "1"}})
    manual_version = client.publish_version(FunctionName="digits")["Version"]
    client.update_alias(FunctionName="digits", Name="live", FunctionVersion=manual_version)
    changes = actions(deploy.plan(code=2))
    assert {id: action for id, action in changes.items() if action != "same"} == {
        "Function": "update",
        "Alias": "update",
    }
    deploy.apply()
    assert client.get_alias(FunctionName="digits", Name="live")["FunctionVersion"] == "1"
    # The manually published version has the hash of the first one, and is removed with it.
    deploy.apply("--set=lambda.memory=1024 --set=keep=1")
    versions = client.list_versions_by_function(FunctionName="digits")["Versions"]
    assert [version["Version"] for version in versions[1:]] == ["3"]


def test_a_manual_change_of_an_endpoints_configuration_is_reverted(
    deploy_to: Callable[..., Deploy],
) -> None:
    deploy = deploy_to("sagemaker")
    deploy.apply()
    config, client = endpoint_config(), sagemaker()
    client.create_endpoint_config(
        EndpointConfigName="theirs", ProductionVariants=config["ProductionVariants"]
    )
    client.update_endpoint(EndpointName="digits", EndpointConfigName="theirs")
    client.describe_endpoint(EndpointName="digits")
    assert f"EndpointConfigName: theirs -> {config['EndpointConfigName']}" in deploy.apply()
    assert endpoint_config()["EndpointConfigName"] == config["EndpointConfigName"]
