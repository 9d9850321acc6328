"""A deployment as a CloudFormation template, whose resources refer to each other by references."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.target import AwsTarget
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Ref, Resource, digest
from tsx_cli.deploy.engine.shapes import fill, read_shapes
from tsx_cli.deploy.spec import Canary, DeploySpec
from tsx_cli.deploy.targets import find_target

# Placeholders for values of the stack. They contain NUL, which no archive's name contains.
ACCOUNT, REGION, IMAGE = "\0AccountId\0", "\0Region\0", "\0Image\0"
SHAPES = Path(__file__).with_name("shapes.yaml")
TSX_PREFIX = "Tsx::"  # prefix of the kinds that CloudFormation does not have
NAMED_KINDS = {  # kinds with a property for the name, such as AlarmName
    "AWS::CloudWatch::Alarm",
    "AWS::IAM::Role",
    "AWS::Lambda::CapacityProvider",
    "AWS::Lambda::Function",
    "AWS::Logs::LogGroup",
    "AWS::S3::Bucket",
    "AWS::SageMaker::Endpoint",
    "AWS::SageMaker::EndpointConfig",
    "AWS::SageMaker::InferenceComponent",
    "AWS::SageMaker::Model",
}
# Kinds whose `Ref` is their ARN, so that `Fn::GetAtt` gives their name.
ARN_REF_KINDS = {
    "AWS::SageMaker::Endpoint",
    "AWS::SageMaker::EndpointConfig",
    "AWS::SageMaker::Model",
}
# Kinds that a change replaces: the old resource still exists then, so the name cannot be fixed.
REPLACEABLE_KINDS = {
    "AWS::SageMaker::EndpointConfig",
    "AWS::SageMaker::Model",
    "AWS::Lambda::CapacityProvider",
}
UNTAGGED_KINDS = {
    "AWS::ApplicationAutoScaling::ScalableTarget",
    "AWS::ApplicationAutoScaling::ScalingPolicy",
    "AWS::Lambda::Alias",
    "AWS::Lambda::Permission",
    "AWS::Lambda::Url",
    "AWS::Lambda::Version",
}
OUTPUTS = (  # name, id of the resource, attribute
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
DEPLOY_STEP = (
    "aws cloudformation deploy --template-file template.yaml --stack-name {name}, with"
    " --parameter-overrides for the parameters at its top"
)


def render_template(spec: DeploySpec, facts: Facts) -> dict[str, Any]:
    """Return the template of a deployment.

    The account and the region are the stack's. The image and the model in S3 are parameters.

    Raises:
        UsageError: CloudFormation cannot create the deployment.
    """
    if spec.sagemaker.multi_model is not None:
        raise UsageError(
            "--emit cloudformation: the models of a multi-model endpoint are files in S3, and"
            " CloudFormation uploads none: use tsx deploy"
        )
    if "{{resolve:" in (model := f"{facts.model_name}/{facts.model_version}"):
        reason = f"a stack would look up what '{model}' names; pack the archive under another name"
        raise UsageError(f"--emit cloudformation: {reason}")
    stack_facts = replace(facts, account=ACCOUNT, region=REGION, image=spec.image or IMAGE)
    target = find_target(spec.target)
    assert isinstance(target, AwsTarget)
    resources = target.resources(spec, stack_facts)
    parameters: dict[str, Any] = {}
    if spec.image is None:
        parameters["Image"] = {
            "Type": "String",
            "Description": (
                "The image in ECR, by its digest; `tsx deploy --emit dockerfile` builds it"
            ),
        }
    uploads = [resource for resource in resources if resource.kind == "Tsx::S3::Object"]
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
    template_resources = [
        resource
        for resource in resources
        if not resource.kind.startswith(TSX_PREFIX) and resource.kind != "AWS::S3::Bucket"
    ]
    substitutions = {f"s3://{resource.name}": {"Ref": "ModelDataUrl"} for resource in uploads} | {
        IMAGE: {"Ref": "Image"}
    }
    entries = {
        resource.id: _resource(resource, template_resources, substitutions)
        for resource in template_resources
    }
    if "Version" in entries:
        entries["Version"] |= _version_properties(entries["Function"]["Properties"])
    for resource in resources:
        # In CloudFormation, provisioned concurrency is a property of the alias.
        if resource.kind == "Tsx::Lambda::ProvisionedConcurrency":
            settings = {**resource.properties, **resource.change_settings}
            number = settings["ProvisionedConcurrentExecutions"]
            entries["Alias"]["Properties"]["ProvisionedConcurrencyConfig"] = {
                "ProvisionedConcurrentExecutions": number
            }
    # Only Lambda needs these entries: the canary of SageMaker is a property of the endpoint.
    if spec.canary is not None and "Alias" in entries:
        entries |= _canary(
            spec.canary,
            next(
                resource.change_settings["alarms"]
                for resource in resources
                if resource.id == "Alias"
            ),
            template_resources,
        )
        entries["Alias"]["UpdatePolicy"] = read_shapes(SHAPES)["canary update"]
    outputs = {
        name: {"Value": _substitute(Ref(id, attribute), {})}
        for name, id, attribute in OUTPUTS
        if id in entries
    }
    header = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"{spec.name}: {model} by tsx deploy",
    }
    return {
        **header,
        **({"Parameters": parameters} if parameters else {}),
        "Resources": entries,
        "Outputs": outputs,
    }


def _canary(
    canary: Canary, alarms: Sequence[str], template_resources: Sequence[Resource]
) -> dict[str, Any]:
    alarm_references = {
        resource.name: {"Ref": resource.id}
        for resource in template_resources
        if resource.kind == "AWS::CloudWatch::Alarm"
    }
    values = {
        "percent": round(canary.percent),
        "minutes": max(1, math.ceil(canary.bake / 60)),
        "is_watched": bool(alarms),
        "alarms": [{"Name": alarm_references.get(name, name)} for name in alarms],
    }
    entries: dict[str, Any] = fill(read_shapes(SHAPES)["canary"], values)
    return entries


def _version_properties(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a version that make CloudFormation publish every new function.

    CloudFormation compares only the version's own properties, so its description contains a hash of
    the function. Earlier versions stay, for rollbacks.
    """
    description = digest(function)
    image = function["Code"]["ImageUri"]
    description_value: Any = (
        {"Fn::Sub": f"{description} ${{Image}}"}
        if isinstance(image, Mapping)
        else f"{description} {image}"
    )
    return {
        "Properties": {"FunctionName": {"Ref": "Function"}, "Description": description_value},
        "UpdateReplacePolicy": "Retain",
        "DeletionPolicy": "Retain",
    }


def _resource(
    resource: Resource, template_resources: Sequence[Resource], substitutions: Mapping[str, Any]
) -> dict[str, Any]:
    all_substitutions = dict(substitutions)
    resources_by_id = {resource.id: resource for resource in template_resources}
    for need in resource.needs:
        if need in resources_by_id and resources_by_id[need].kind in NAMED_KINDS:
            all_substitutions[resources_by_id[need].name] = _reference(resources_by_id[need])
    settings = {
        **resource.properties,
        **(resource.change_settings if resource.kind.startswith("AWS::SageMaker::") else {}),
    }
    properties = _substitute(settings, all_substitutions)
    name = f"{resource.short_kind}Name"
    if name not in properties and resource.kind in NAMED_KINDS - REPLACEABLE_KINDS:
        properties = {name: resource.name, **properties}
    tags = {key: value for key, value in resource.tags.items() if value != IMAGE and value}
    if tags and resource.kind not in UNTAGGED_KINDS:
        properties["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
    entries: dict[str, Any] = {"Type": resource.kind, "Properties": properties}
    needs = [
        need
        for need in resource.needs
        if need in resources_by_id and need not in _referenced_ids(properties)
    ]
    return entries | ({"DependsOn": needs} if needs else {})


def _reference(resource: Resource) -> dict[str, Any]:
    if resource.kind in ARN_REF_KINDS:
        return {"Fn::GetAtt": [resource.id, f"{resource.short_kind}Name"]}
    return {"Ref": resource.id}


def _substitute(value: Any, substitutions: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return (
            {"Ref": value.id}
            if value.attribute == "Ref"
            else {"Fn::GetAtt": [value.id, value.attribute]}
        )
    if isinstance(value, Mapping):
        return {key: _substitute(item, substitutions) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_substitute(item, substitutions) for item in value]
    if isinstance(value, str):
        if value in substitutions:
            return substitutions[value]
        text = value.replace("${", "${!").replace(ACCOUNT, "${AWS::AccountId}")
        text = text.replace(REGION, "${AWS::Region}")
        return {"Fn::Sub": text} if ACCOUNT in value or REGION in value else value
    return value


def _referenced_ids(value: Any) -> set[str]:
    """Return the ids to which a value refers.

    CloudFormation derives the order from these references, so the ids need no `DependsOn`.
    """
    if isinstance(value, Mapping):
        if set(value) == {"Ref"}:
            return {value["Ref"]}
        if set(value) == {"Fn::GetAtt"}:
            return {value["Fn::GetAtt"][0]}
        return {id for item in value.values() for id in _referenced_ids(item)}
    return (
        {id for item in value for id in _referenced_ids(item)} if isinstance(value, list) else set()
    )
