"""The resources of a deployment as a CloudFormation template: the engine's dicts, with references
instead of names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws_lambda import resources as aws_lambda
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Ref, Resource, digest
from tsx_cli.deploy.engine.shapes import filled, shapes
from tsx_cli.deploy.sagemaker import forms as sagemaker
from tsx_cli.deploy.spec import Canary, DeploySpec

# Placeholders for values of the stack. An archive's name holds no NUL, and so none of them.
ACCOUNT, REGION, IMAGE = "\0AccountId\0", "\0Region\0", "\0Image\0"
SHAPES = Path(__file__).with_name("shapes.yaml")
OWN = "Tsx::"  # kinds that CloudFormation does not have
NAMED = {  # the property that holds a resource's name
    "AWS::CloudWatch::Alarm": "AlarmName",
    "AWS::IAM::Role": "RoleName",
    "AWS::Lambda::CapacityProvider": "CapacityProviderName",
    "AWS::Lambda::Function": "FunctionName",
    "AWS::Logs::LogGroup": "LogGroupName",
    "AWS::S3::Bucket": "BucketName",
    "AWS::SageMaker::Endpoint": "EndpointName",
    "AWS::SageMaker::EndpointConfig": "EndpointConfigName",
    "AWS::SageMaker::InferenceComponent": "InferenceComponentName",
    "AWS::SageMaker::Model": "ModelName",
}
# `Ref` gives their ARN, `Fn::GetAtt` their name
BY_ATTRIBUTE = {
    "AWS::SageMaker::Endpoint",
    "AWS::SageMaker::EndpointConfig",
    "AWS::SageMaker::Model",
}
# where they change, which a name of ours would prevent
REPLACED = {
    "AWS::SageMaker::EndpointConfig",
    "AWS::SageMaker::Model",
    "AWS::Lambda::CapacityProvider",
}
BARE = {  # cannot carry tags
    "AWS::ApplicationAutoScaling::ScalableTarget",
    "AWS::ApplicationAutoScaling::ScalingPolicy",
    "AWS::Lambda::Alias",
    "AWS::Lambda::Permission",
    "AWS::Lambda::Url",
    "AWS::Lambda::Version",
}
OUTPUTS = (  # name, the id of a resource, its attribute
    ("EndpointName", "Endpoint", "EndpointName"),
    ("EndpointArn", "Endpoint", "Ref"),
    ("EndpointConfigName", "EndpointConfig", "EndpointConfigName"),
    ("ModelName", "Model", "ModelName"),
    ("InferenceComponentArn", "Component", "InferenceComponentArn"),
    ("FunctionName", "Function", "Ref"),
    ("FunctionArn", "Function", "Arn"),
    ("Version", "Version", "Version"),
    ("AliasArn", "Alias", "Ref"),
    ("Url", "Url", "FunctionUrl"),
    ("CanaryGroup", "CanaryGroup", "Ref"),
    ("RoleArn", "Role", "Arn"),
    ("LogGroup", "LogGroup", "Ref"),
)
NEEDS_NOTE = (
    "aws cloudformation deploy --template-file template.yaml --stack-name {name}, with"
    " --parameter-overrides for the parameters at its top"
)


def template(spec: DeploySpec, facts: Facts) -> dict[str, Any]:
    """Account and region are those of the stack; the image, and the model where it lies in S3, are
    parameters.
    """
    if spec.sagemaker.multi_model is not None:
        raise UsageError(
            "--emit cloudformation: the models of a multi-model endpoint are files in S3, and"
            " CloudFormation uploads none: use tsx deploy"
        )
    if "{{resolve:" in (model := f"{facts.model_name}/{facts.model_version}"):
        why = f"a stack would look up what '{model}' names; pack the archive under another name"
        raise UsageError(f"--emit cloudformation: {why}")
    there = replace(facts, account=ACCOUNT, region=REGION, image=spec.image or IMAGE)
    resources = (sagemaker if spec.target == "sagemaker" else aws_lambda).resources(spec, there)
    parameters: dict[str, Any] = {}
    if spec.image is None:
        parameters["Image"] = {
            "Type": "String",
            "Description": (
                "The image in ECR, by its digest; `tsx deploy --emit dockerfile` builds it"
            ),
        }
    uploads = [each for each in resources if each.kind == "Tsx::S3::Object"]
    if uploads:
        text = (
            f"model.tar.gz with {facts.archive.name} in it: tar --create --gzip --file model.tar.gz"
            f" {facts.archive.name}"
        )
        parameters["ModelDataUrl"] = {
            "Type": "String",
            "Description": f"s3:// address of {text}",
            "AllowedPattern": "s3://.+",
        }
    made = [
        each
        for each in resources
        if not each.kind.startswith(OWN) and each.kind != "AWS::S3::Bucket"
    ]  # the bucket holds that file
    replaced = {f"s3://{each.name}": {"Ref": "ModelDataUrl"} for each in uploads} | {
        IMAGE: {"Ref": "Image"}
    }
    entries = {each.id: _resource(each, made, replaced) for each in made}
    if "Version" in entries:
        entries["Version"] |= _published(entries["Function"]["Properties"])
    for each in resources:
        if (
            each.kind == "Tsx::Lambda::ProvisionedConcurrency"
        ):  # which CloudFormation has as a part of the alias
            number = {**each.properties, **each.how}["ProvisionedConcurrentExecutions"]
            entries["Alias"]["Properties"]["ProvisionedConcurrencyConfig"] = {
                "ProvisionedConcurrentExecutions": number
            }
    if spec.canary is not None and "Alias" in entries:  # SageMaker's is a part of the endpoint
        entries |= _canary(
            spec.canary, next(each.how["alarms"] for each in resources if each.id == "Alias"), made
        )
        entries["Alias"]["UpdatePolicy"] = shapes(SHAPES)["canary update"]
    outputs = {
        name: {"Value": _written(Ref(id, attribute), {})}
        for name, id, attribute in OUTPUTS
        if id in entries
    }
    head = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"{spec.name}: {model} by tsx deploy",
    }
    return {
        **head,
        **({"Parameters": parameters} if parameters else {}),
        "Resources": entries,
        "Outputs": outputs,
    }


def _canary(canary: Canary, alarms: Sequence[str], made: Sequence[Resource]) -> dict[str, Any]:
    ours = {each.name: {"Ref": each.id} for each in made if each.kind == "AWS::CloudWatch::Alarm"}
    values = {
        "percent": round(canary.percent),
        "minutes": max(1, math.ceil(canary.bake / 60)),
        "is_watched": bool(alarms),
        "alarms": [{"Name": ours.get(name, name)} for name in alarms],
    }
    found: dict[str, Any] = filled(shapes(SHAPES)["canary"], values)
    return found


def _published(function: Mapping[str, Any]) -> dict[str, Any]:
    """A new version for another function or image: CloudFormation publishes one only where the
    version itself says something else.

    Those before it stay, so that the alias can go back to them.
    """
    description = digest(function)
    image = function["Code"]["ImageUri"]
    entries: Any = (
        {"Fn::Sub": f"{description} ${{Image}}"}
        if isinstance(image, Mapping)
        else f"{description} {image}"
    )
    return {
        "Properties": {"FunctionName": {"Ref": "Function"}, "Description": entries},
        "UpdateReplacePolicy": "Retain",
        "DeletionPolicy": "Retain",
    }


def _resource(
    resource: Resource, others: Sequence[Resource], replaced: Mapping[str, Any]
) -> dict[str, Any]:
    referred = dict(replaced)
    by_id = {each.id: each for each in others}
    for need in resource.needs:
        if need in by_id and by_id[need].kind in NAMED:
            referred[by_id[need].name] = _reference(by_id[need])
    whole = {
        **resource.properties,
        **(resource.how if resource.kind.startswith("AWS::SageMaker::") else {}),
    }
    properties = _written(whole, referred)
    name = NAMED.get(resource.kind)
    if name is not None and name not in properties and resource.kind not in REPLACED:
        properties = {name: resource.name, **properties}
    tags = {key: value for key, value in resource.tags.items() if value != IMAGE and value}
    if tags and resource.kind not in BARE:
        properties["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
    entries: dict[str, Any] = {"Type": resource.kind, "Properties": properties}
    needs = [need for need in resource.needs if need in by_id and need not in _named_in(properties)]
    return entries | ({"DependsOn": needs} if needs else {})


def _reference(resource: Resource) -> dict[str, Any]:
    if resource.kind in BY_ATTRIBUTE:
        return {"Fn::GetAtt": [resource.id, NAMED[resource.kind]]}
    return {"Ref": resource.id}


def _written(value: Any, replaced: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return (
            {"Ref": value.id}
            if value.attribute == "Ref"
            else {"Fn::GetAtt": [value.id, value.attribute]}
        )
    if isinstance(value, Mapping):
        return {key: _written(each, replaced) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(each, replaced) for each in value]
    if isinstance(value, str):
        if value in replaced:
            return replaced[value]
        text = value.replace("${", "${!").replace(ACCOUNT, "${AWS::AccountId}")
        text = text.replace(REGION, "${AWS::Region}")
        return {"Fn::Sub": text} if ACCOUNT in value or REGION in value else value
    return value


def _named_in(value: Any) -> set[str]:
    """Ids that a text of CloudFormation refers to: what needs them need not say so again."""
    if isinstance(value, Mapping):
        if set(value) == {"Ref"}:
            return {value["Ref"]}
        if set(value) == {"Fn::GetAtt"}:
            return {value["Fn::GetAtt"][0]}
        return {found for each in value.values() for found in _named_in(each)}
    return (
        {found for each in value for found in _named_in(each)} if isinstance(value, list) else set()
    )
