"""What stands around a Lambda function: its URL and who may call it, its queue, its provisioned concurrency, its managed instances."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.deploy.aws.session import Cloud, looked_up, translated_errors
from tsx_cli.deploy.aws_lambda.kinds import Alias, Function, Version, described
from tsx_cli.deploy.engine.kind import Kind, only
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits

PROVIDER = ("PermissionsConfig", "VpcConfig", "InstanceRequirements", "CapacityProviderScalingConfig")
MAPPING = ("EventSourceArn", "BatchSize", "MaximumBatchingWindowInSeconds", "FunctionResponseTypes", "ScalingConfig")


class Url:
    """Its name is `function:alias`."""

    traits = Traits(is_tagged=False, fixed=frozenset({"TargetFunctionArn", "Qualifier"}))
    poll, patience = 1.0, 60.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        which = _which(name)
        found = described(cloud, "get_function_url_config", f"looking for the URL of {name}", **which)
        if found is None:
            return None
        properties = {
            "TargetFunctionArn": which["FunctionName"],
            "Qualifier": which["Qualifier"],
            **only(found, ("AuthType", "InvokeMode")),
        }
        return Observed(name, properties, outputs={"FunctionUrl": found["FunctionUrl"], "Ref": found["FunctionArn"]})

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"giving {resource.name} a URL"):
            cloud.client("lambda").create_function_url_config(**_which(resource.name), **_modes(resource.properties))

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        with translated_errors(f"changing the URL of {resource.name}"):
            cloud.client("lambda").update_function_url_config(**_which(resource.name), **_modes(resource.properties))

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with translated_errors(f"removing the URL of {found.name}"):
            cloud.client("lambda").delete_function_url_config(**_which(found.name))


class Permission:
    """A statement of the policy of a function's alias. Its name is `function:alias|statement`; the statement's, a hash, says all of it."""

    traits = Traits(
        is_tagged=False,
        fixed=frozenset({"Action", "Principal"}),
        unseen=frozenset({"FunctionName", "FunctionUrlAuthType", "InvokedViaFunctionUrl"}),
    )
    poll, patience = 1.0, 60.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        place, _, statement = name.partition("|")
        found = next((each for each in statements(cloud, place) if each["Sid"] == statement), None)
        if found is None:
            return None
        who = found["Principal"]
        return Observed(name, {"Action": found["Action"], "Principal": who.get("AWS", who) if isinstance(who, dict) else who})

    def create(self, cloud: Cloud, resource: Resource) -> None:
        place, _, statement = resource.name.partition("|")
        arguments = {key: value for key, value in resource.properties.items() if key != "FunctionName"}
        with translated_errors(f"letting callers of the URL in to {place}"):
            cloud.client("lambda").add_permission(StatementId=statement, **_which(place), **arguments)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        pass  # its name says all that it is

    def delete(self, cloud: Cloud, found: Observed) -> None:
        place, _, statement = found.name.partition("|")
        with translated_errors(f"taking a permission from {place}"):
            cloud.client("lambda").remove_permission(StatementId=statement, **_which(place))


class EventSourceMapping:
    """Its name is `function:alias|queue`."""

    traits = Traits(fixed=frozenset({"EventSourceArn"}), unseen=frozenset({"FunctionName"}), removable=frozenset({"ScalingConfig"}))
    poll, patience = 2.0, 600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        place, _, queue = name.partition("|")
        found = next((each for each in mappings(cloud, place) if each["EventSourceArn"] == queue), None)
        if found is None:
            return None
        changing = found["State"] not in ("Enabled", "Disabled")
        with translated_errors("reading tags"):
            tags = cloud.client("lambda").list_tags(Resource=found["EventSourceMappingArn"])["Tags"]
        found = {key: value for key, value in found.items() if value != {}}  # a bound that was taken away is told as one of nothing
        outputs = {"Ref": found["UUID"], "Arn": found["EventSourceMappingArn"], "status": found["State"]}
        return Observed(name, only(found, MAPPING), tags, outputs, "changing" if changing else "ready", found["State"] if changing else "")

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"sending messages of {resource.properties['EventSourceArn']} to {resource.properties['FunctionName']}"):
            cloud.client("lambda").create_event_source_mapping(Tags=dict(resource.tags), **resource.properties)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        client = cloud.client("lambda")
        arguments = {"ScalingConfig": {}, **resource.properties}
        arguments.pop("EventSourceArn")
        with translated_errors(f"changing how messages come to {arguments['FunctionName']}"):
            if any(field.path.split(".")[0] != "tags" for field in fields):
                client.update_event_source_mapping(UUID=found.outputs["Ref"], **arguments)
            client.tag_resource(Resource=found.outputs["Arn"], Tags=dict(resource.tags))

    def delete(self, cloud: Cloud, found: Observed) -> None:
        if found.outputs["status"] == "Deleting":
            return
        with translated_errors(f"sending no more messages to {found.name.partition('|')[0]}"):
            cloud.client("lambda").delete_event_source_mapping(UUID=found.outputs["Ref"])


class ProvisionedConcurrency:
    """Environments that are there before requests are. Its name is `function:alias`, whose versions share them."""

    traits = Traits(is_tagged=False, fixed=frozenset({"FunctionName", "Qualifier"}))
    poll, patience = 5.0, 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        which = _which(name)
        found = described(cloud, "get_provisioned_concurrency_config", f"looking for the provisioned concurrency of {name}", **which)
        if found is None:
            return None
        wanted, there = found["RequestedProvisionedConcurrentExecutions"], found.get("AvailableProvisionedConcurrentExecutions", 0)
        states: dict[str, State] = {"READY": "ready", "FAILED": "failed"}
        state = states.get(found["Status"], "changing")
        reason = "" if state == "ready" else found.get("StatusReason") or f"{there} of {wanted} are there"
        return Observed(
            name, {**which, "ProvisionedConcurrentExecutions": wanted}, outputs={"available": there}, state=state, reason=reason
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"keeping environments of {resource.name} ready"):
            arguments = {**resource.how, **resource.properties}
            cloud.client("lambda").put_provisioned_concurrency_config(**arguments)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        self.create(cloud, resource)

    def delete(self, cloud: Cloud, found: Observed) -> None:
        with translated_errors(f"keeping no environments of {found.name} ready"):
            cloud.client("lambda").delete_provisioned_concurrency_config(**_which(found.name))


class CapacityProvider:
    """The instances of one's own that Lambda manages."""

    traits = Traits(fixed=frozenset(PROVIDER[:3]))
    poll, patience = 5.0, 1800.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        answer = described(cloud, "get_capacity_provider", f"looking for the capacity provider {name}", CapacityProviderName=name)
        if answer is None:
            return None
        found = answer["CapacityProvider"]
        arn = found["CapacityProviderArn"]
        states: dict[str, State] = {"Active": "ready", "Failed": "failed"}
        with translated_errors("reading tags"):
            tags = cloud.client("lambda").list_tags(Resource=arn)["Tags"]
        state = states.get(found["State"], "changing")
        return Observed(name, only(found, PROVIDER), tags, {"Arn": arn, "Ref": name}, state, "" if state == "ready" else found["State"])

    def create(self, cloud: Cloud, resource: Resource) -> None:
        with translated_errors(f"creating the capacity provider {resource.name}"):
            client = cloud.client("lambda")
            client.create_capacity_provider(CapacityProviderName=resource.name, Tags=dict(resource.tags), **resource.properties)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        client = cloud.client("lambda")
        with translated_errors(f"changing the capacity provider {resource.name}"):
            arguments = only(resource.properties, ("CapacityProviderScalingConfig",))
            if arguments and any(field.path.startswith("CapacityProviderScalingConfig") for field in fields):
                client.update_capacity_provider(CapacityProviderName=resource.name, **arguments)
            client.tag_resource(Resource=found.outputs["Arn"], Tags=dict(resource.tags))

    def delete(self, cloud: Cloud, found: Observed) -> None:
        if found.reason == "Deleting":
            return
        with translated_errors(f"deleting the capacity provider {found.name}"):
            cloud.client("lambda").delete_capacity_provider(CapacityProviderName=found.name)


def statements(cloud: Cloud, place: str) -> list[dict[str, Any]]:
    """Of the policy of `function:alias`."""
    found = described(cloud, "get_policy", f"looking for who may call {place}", **_which(place))
    return [] if found is None else list(json.loads(found["Policy"])["Statement"])


def mappings(cloud: Cloud, place: str) -> list[dict[str, Any]]:
    """What sends events to `function:alias`."""
    pages = cloud.client("lambda").get_paginator("list_event_source_mappings").paginate(FunctionName=place)
    doing = f"looking for what sends events to {place}"
    return looked_up(doing, lambda: [each for page in pages for each in page["EventSourceMappings"]]) or []


def _which(place: str) -> dict[str, str]:
    function, _, alias = place.partition(":")
    return {"FunctionName": function, "Qualifier": alias}


def _modes(properties: Mapping[str, Any]) -> dict[str, Any]:
    return only(properties, ("AuthType", "InvokeMode"))


KINDS: Mapping[str, Kind] = {
    "AWS::Lambda::Alias": Alias(),
    "AWS::Lambda::CapacityProvider": CapacityProvider(),
    "AWS::Lambda::EventSourceMapping": EventSourceMapping(),
    "AWS::Lambda::Function": Function(),
    "AWS::Lambda::Permission": Permission(),
    "AWS::Lambda::Url": Url(),
    "AWS::Lambda::Version": Version(),
    "Tsx::Lambda::ProvisionedConcurrency": ProvisionedConcurrency(),
}
