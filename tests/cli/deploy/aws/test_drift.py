"""What somebody changes by hand, in the console: the plan shows it, and applying the plan puts it
back.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.deploying import Deploy, actions
from tests.support.platforms.aws import Course
from tests.support.platforms.aws_lambda import make_role

pytestmark = pytest.mark.slow

NETWORK = {"SubnetIds": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}


@pytest.fixture
def deploy(archive: Path, course: Course, capsys: pytest.CaptureFixture[str]) -> Deploy:
    make_role()
    return Deploy(archive, "lambda", capsys)


def layer() -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("more.py", "")
    arn: str = boto3.client("lambda").publish_layer_version(
        LayerName="theirs", Content={"ZipFile": file.getvalue()}
    )["LayerVersionArn"]
    return arn


def shown(deploy: Deploy, *words: str) -> dict[str, Any]:
    """What a plan says of the function alone: everything else is as it should be."""
    planned = deploy.plan(*words, code=2)
    assert {id for id, action in actions(planned).items() if action != "same"} == {"Function"}
    fields = next(change["fields"] for change in planned["changes"] if change["id"] == "Function")
    return {each["path"]: (each["old"], each["new"]) for each in fields}


@pytest.mark.parametrize("words", [[], ["--set=env.LEVEL=low"]])
def test_a_variable_that_was_added_or_changed_by_hand_is_put_back(
    deploy: Deploy, words: list[str]
) -> None:
    deploy.apply(*words)
    client = boto3.client("lambda")
    there = {"LEVEL": "high", "MORE": "1", "API_TOKEN": "secret"}
    client.update_function_configuration(FunctionName="digits", Environment={"Variables": there})
    gone = {f"Environment.Variables.{name}": (value, None) for name, value in there.items()}
    gone["Environment.Variables.API_TOKEN"] = ("(hidden)", None)
    if words:
        gone["Environment.Variables.LEVEL"] = ("high", "low")
    assert shown(deploy, *words) == gone
    assert "MORE: 1 -> nothing" in deploy.apply(*words)
    now = client.get_function_configuration(FunctionName="digits").get("Environment", {})
    assert now.get("Variables", {}) == ({"LEVEL": "low"} if words else {})
    deploy.plan(*words, code=0)


def test_a_network_that_was_added_changed_or_taken_away_by_hand_is_put_back(deploy: Deploy) -> None:
    client = boto3.client("lambda")
    words = ["--set=lambda.subnets=subnet-2,subnet-1", "--set=lambda.security_groups=sg-1"]
    deploy.apply()
    client.update_function_configuration(FunctionName="digits", VpcConfig=NETWORK)
    assert shown(deploy) == {f"VpcConfig.{key}": (value, None) for key, value in NETWORK.items()}
    deploy.apply()
    assert not client.get_function_configuration(FunctionName="digits")["VpcConfig"].get(
        "SubnetIds"
    )
    deploy.apply(*words)
    client.update_function_configuration(
        FunctionName="digits", VpcConfig={**NETWORK, "SecurityGroupIds": ["sg-1", "sg-2"]}
    )
    assert shown(deploy, *words) == {"VpcConfig.SecurityGroupIds": (["sg-1", "sg-2"], ["sg-1"])}
    client.update_function_configuration(
        FunctionName="digits", VpcConfig={"SubnetIds": [], "SecurityGroupIds": []}
    )
    assert shown(deploy, *words) == {
        f"VpcConfig.{key}": (None, value) for key, value in NETWORK.items()
    }
    deploy.apply(*words)
    deploy.plan(*words, code=0)


def test_a_layer_that_was_added_by_hand_is_taken_away(deploy: Deploy) -> None:
    deploy.apply()
    client, arn = boto3.client("lambda"), layer()
    client.update_function_configuration(FunctionName="digits", Layers=[arn])
    assert shown(deploy) == {"Layers": ([arn], None)}
    deploy.apply()
    assert not client.get_function_configuration(FunctionName="digits").get("Layers")
    deploy.plan(code=0)


def test_a_version_that_was_published_by_hand_with_other_variables_is_not_taken_for_ours(
    deploy: Deploy,
) -> None:
    deploy.apply()
    client = boto3.client("lambda")
    client.update_function_configuration(
        FunctionName="digits", Environment={"Variables": {"MORE": "1"}}
    )
    theirs = client.publish_version(FunctionName="digits")["Version"]
    client.update_alias(FunctionName="digits", Name="live", FunctionVersion=theirs)
    assert actions(deploy.plan(code=2)) == {
        "LogGroup": "same",
        "Function": "update",
        "Version": "same",
        "Alias": "update",
        "Url": "same",
    }
    deploy.apply()
    assert client.get_alias(FunctionName="digits", Name="live")["FunctionVersion"] == "1"
    deploy.apply(
        "--set=lambda.memory=1024", "--set=keep=1"
    )  # it goes with the version whose hash it has
    assert [
        each["Version"]
        for each in client.list_versions_by_function(FunctionName="digits")["Versions"][1:]
    ] == ["3"]


def test_an_endpoint_that_was_given_another_configuration_by_hand_is_put_back(
    archive: Path, course: Course, capsys: Any
) -> None:
    deploy = Deploy(archive, "sagemaker", capsys)
    deploy.apply()
    client = boto3.client("sagemaker")
    ours = client.describe_endpoint(EndpointName="digits")["EndpointConfigName"]
    variants = client.describe_endpoint_config(EndpointConfigName=ours)["ProductionVariants"]
    client.create_endpoint_config(EndpointConfigName="theirs", ProductionVariants=variants)
    client.update_endpoint(EndpointName="digits", EndpointConfigName="theirs")
    client.describe_endpoint(EndpointName="digits")
    assert f"EndpointConfigName: theirs -> {ours}" in deploy.apply()
    assert client.describe_endpoint(EndpointName="digits")["EndpointConfigName"] == ours
