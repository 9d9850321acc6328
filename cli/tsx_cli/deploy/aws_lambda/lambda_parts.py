"""Resources around a Lambda function: its URL and permissions, its queue, its provisioned
concurrency, its managed instances.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.aws_lambda.kinds import Alias, LambdaFunction, PublishedVersion
from tsx_cli.deploy.engine.kind import ResourceKind, only
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits

PROVIDER = (
    "PermissionsConfig",
    "VpcConfig",
    "InstanceRequirements",
    "CapacityProviderScalingConfig",
)
MODES = ("AuthType", "InvokeMode")
MAPPING = (
    "EventSourceArn",
    "BatchSize",
    "MaximumBatchingWindowInSeconds",
    "FunctionResponseTypes",
    "ScalingConfig",
)


class Url(ResourceKind):
    """Its name is `function:alias`."""

    traits = Traits(is_tagged=False, fixed=frozenset({"TargetFunctionArn", "Qualifier"}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        which = _which(name)
        found = cloud.find(
            "lambda", "get_function_url_config", f"looking for the URL of {name}", **which
        )
        if found is None:
            return None
        properties = {
            "TargetFunctionArn": which["FunctionName"],
            "Qualifier": which["Qualifier"],
            **only(found, MODES),
        }
        return Observed(
            name,
            properties,
            outputs={"FunctionUrl": found["FunctionUrl"], "Ref": found["FunctionArn"]},
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = {**_which(resource.name), **only(resource.properties, MODES)}
        cloud.call(
            "lambda", "create_function_url_config", f"giving {resource.name} a URL", **wanted
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        wanted = {**_which(resource.name), **only(resource.properties, MODES)}
        cloud.call(
            "lambda", "update_function_url_config", f"changing the URL of {resource.name}", **wanted
        )

    def delete(self, cloud: Cloud, found: Observed) -> None:
        cloud.call(
            "lambda",
            "delete_function_url_config",
            f"removing the URL of {found.name}",
            **_which(found.name),
        )


class Permission(ResourceKind):
    """A statement of the policy of a function's alias.

    Its name is `function:alias|statement`; the statement's, a hash, says all of it.
    """

    traits = Traits(
        is_tagged=False,
        fixed=frozenset({"Action", "Principal"}),
        unseen=frozenset({"FunctionName", "FunctionUrlAuthType", "InvokedViaFunctionUrl"}),
    )

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        place, _, statement = name.partition("|")
        found = next((each for each in statements(cloud, place) if each["Sid"] == statement), None)
        if found is None:
            return None
        who = found["Principal"]
        return Observed(
            name,
            {
                "Action": found["Action"],
                "Principal": who.get("AWS", who) if isinstance(who, dict) else who,
            },
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        place, _, statement = resource.name.partition("|")
        wanted = {"StatementId": statement, **resource.properties, **_which(place)}
        cloud.call(
            "lambda", "add_permission", f"letting callers of the URL in to {place}", **wanted
        )

    def delete(self, cloud: Cloud, found: Observed) -> None:
        place, _, statement = found.name.partition("|")
        which = {"StatementId": statement, **_which(place)}
        cloud.call("lambda", "remove_permission", f"taking a permission from {place}", **which)


class EventSourceMapping(ResourceKind):
    """Its name is `function:alias|queue`."""

    traits = Traits(
        fixed=frozenset({"EventSourceArn"}),
        unseen=frozenset({"FunctionName"}),
        removable=frozenset({"ScalingConfig"}),
    )
    poll, patience = 2.0, 600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        place, _, queue = name.partition("|")
        found = next(
            (each for each in mappings(cloud, place) if each["EventSourceArn"] == queue), None
        )
        if found is None:
            return None
        changing = found["State"] not in ("Enabled", "Disabled")
        tags = cloud.call(
            "lambda", "list_tags", "reading tags", Resource=found["EventSourceMappingArn"]
        )["Tags"]
        found = {
            key: value for key, value in found.items() if value != {}
        }  # Lambda reports a removed bound as an empty one
        outputs = {
            "Ref": found["UUID"],
            "Arn": found["EventSourceMappingArn"],
            "status": found["State"],
        }
        return Observed(
            name,
            only(found, MAPPING),
            tags,
            outputs,
            "changing" if changing else "ready",
            found["State"] if changing else "",
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        doing = (
            f"sending messages of {resource.properties['EventSourceArn']} to"
            f" {resource.properties['FunctionName']}"
        )
        cloud.call(
            "lambda",
            "create_event_source_mapping",
            doing,
            Tags=dict(resource.tags),
            **resource.properties,
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        arguments = {"ScalingConfig": {}, **resource.properties, "UUID": found.outputs["Ref"]}
        arguments.pop("EventSourceArn")
        doing = f"changing the event source of {arguments['FunctionName']}"
        if changed - {"tags"}:
            cloud.call("lambda", "update_event_source_mapping", doing, **arguments)
        cloud.call(
            "lambda", "tag_resource", doing, Resource=found.outputs["Arn"], Tags=dict(resource.tags)
        )

    def delete(self, cloud: Cloud, found: Observed) -> None:
        if found.outputs["status"] != "Deleting":
            doing = f"sending no more messages to {found.name.partition('|')[0]}"
            cloud.call("lambda", "delete_event_source_mapping", doing, UUID=found.outputs["Ref"])


class ProvisionedConcurrency(ResourceKind):
    """Environments that are started before requests arrive.

    Its name is `function:alias`, whose versions share them.
    """

    traits = Traits(is_tagged=False, fixed=frozenset({"FunctionName", "Qualifier"}))
    poll, patience = 5.0, 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        which = _which(name)
        doing = f"looking for the provisioned concurrency of {name}"
        found = cloud.find("lambda", "get_provisioned_concurrency_config", doing, **which)
        if found is None:
            return None
        wanted, there = (
            found["RequestedProvisionedConcurrentExecutions"],
            found.get("AvailableProvisionedConcurrentExecutions", 0),
        )
        states: dict[str, State] = {"READY": "ready", "FAILED": "failed"}
        state = states.get(found["Status"], "changing")
        reason = (
            ""
            if state == "ready"
            else found.get("StatusReason") or f"{there} of {wanted} are there"
        )
        return Observed(
            name, {**which, "ProvisionedConcurrentExecutions": wanted}, state=state, reason=reason
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = {**resource.how, **resource.properties}
        cloud.call(
            "lambda",
            "put_provisioned_concurrency_config",
            f"keeping environments of {resource.name} ready",
            **wanted,
        )

    def delete(self, cloud: Cloud, found: Observed) -> None:
        doing = f"keeping no environments of {found.name} ready"
        cloud.call("lambda", "delete_provisioned_concurrency_config", doing, **_which(found.name))


class CapacityProvider(ResourceKind):
    """Instances in the user's account that Lambda manages."""

    traits = Traits(fixed=frozenset(PROVIDER[:3]))
    poll, patience = 5.0, 1800.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        answer = cloud.find(
            "lambda",
            "get_capacity_provider",
            f"looking for the capacity provider {name}",
            CapacityProviderName=name,
        )
        if answer is None:
            return None
        found = answer["CapacityProvider"]
        arn = found["CapacityProviderArn"]
        states: dict[str, State] = {"Active": "ready", "Failed": "failed"}
        tags = cloud.call("lambda", "list_tags", "reading tags", Resource=arn)["Tags"]
        state = states.get(found["State"], "changing")
        return Observed(
            name,
            only(found, PROVIDER),
            tags,
            {"Arn": arn, "Ref": name},
            state,
            "" if state == "ready" else found["State"],
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = {
            "CapacityProviderName": resource.name,
            "Tags": dict(resource.tags),
            **resource.properties,
        }
        cloud.call(
            "lambda",
            "create_capacity_provider",
            f"creating the capacity provider {resource.name}",
            **wanted,
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        doing = f"changing the capacity provider {resource.name}"
        arguments = only(resource.properties, ("CapacityProviderScalingConfig",))
        if arguments and "CapacityProviderScalingConfig" in changed:
            cloud.call(
                "lambda",
                "update_capacity_provider",
                doing,
                CapacityProviderName=resource.name,
                **arguments,
            )
        cloud.call(
            "lambda", "tag_resource", doing, Resource=found.outputs["Arn"], Tags=dict(resource.tags)
        )

    def delete(self, cloud: Cloud, found: Observed) -> None:
        if found.reason != "Deleting":
            doing = f"deleting the capacity provider {found.name}"
            cloud.call("lambda", "delete_capacity_provider", doing, CapacityProviderName=found.name)


def statements(cloud: Cloud, place: str) -> list[dict[str, Any]]:
    """Of the policy of `function:alias`."""
    found = cloud.find(
        "lambda", "get_policy", f"looking for the callers that {place} permits", **_which(place)
    )
    return [] if found is None else list(json.loads(found["Policy"])["Statement"])


def mappings(cloud: Cloud, place: str) -> list[dict[str, Any]]:
    """What sends events to `function:alias`."""
    doing = f"looking for what sends events to {place}"
    return cloud.listed(
        "lambda", "list_event_source_mappings", "EventSourceMappings", doing, FunctionName=place
    )


def _which(place: str) -> dict[str, str]:
    function, _, alias = place.partition(":")
    return {"FunctionName": function, "Qualifier": alias}


KINDS: Mapping[str, ResourceKind] = {
    "AWS::Lambda::Alias": Alias(),
    "AWS::Lambda::CapacityProvider": CapacityProvider(),
    "AWS::Lambda::EventSourceMapping": EventSourceMapping(),
    "AWS::Lambda::Function": LambdaFunction(),
    "AWS::Lambda::Permission": Permission(),
    "AWS::Lambda::Url": Url(),
    "AWS::Lambda::Version": PublishedVersion(),
    "Tsx::Lambda::ProvisionedConcurrency": ProvisionedConcurrency(),
}
