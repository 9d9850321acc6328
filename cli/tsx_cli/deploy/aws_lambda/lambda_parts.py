"""Resources around a Lambda function: URL, permissions, queue, concurrency, managed instances."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.aws_lambda.kinds import Alias, LambdaFunction, PublishedVersion
from tsx_cli.deploy.engine.kind import ResourceKind, pick
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
    """The URL of an alias; its name is `function:alias`."""

    traits = Traits(is_tagged=False, fixed=frozenset({"TargetFunctionArn", "Qualifier"}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        which = _alias_args(name)
        config = cloud.find(
            "lambda", "get_function_url_config", f"looking for the URL of {name}", **which
        )
        if config is None:
            return None
        properties = {
            "TargetFunctionArn": which["FunctionName"],
            "Qualifier": which["Qualifier"],
            **pick(config, MODES),
        }
        return Observed(
            name,
            properties,
            outputs={"FunctionUrl": config["FunctionUrl"], "Ref": config["FunctionArn"]},
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = {**_alias_args(resource.name), **pick(resource.properties, MODES)}
        cloud.call(
            "lambda", "create_function_url_config", f"giving {resource.name} a URL", **wanted
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        wanted = {**_alias_args(resource.name), **pick(resource.properties, MODES)}
        cloud.call(
            "lambda", "update_function_url_config", f"changing the URL of {resource.name}", **wanted
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        cloud.call(
            "lambda",
            "delete_function_url_config",
            f"removing the URL of {observed.name}",
            **_alias_args(observed.name),
        )


class Permission(ResourceKind):
    """A statement in the policy of an alias.

    Its name is `function:alias|statement`; the last part is a hash of the statement.
    """

    traits = Traits(
        is_tagged=False,
        fixed=frozenset({"Action", "Principal"}),
        unreported=frozenset({"FunctionName", "FunctionUrlAuthType", "InvokedViaFunctionUrl"}),
    )

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        alias, _, statement = name.partition("|")
        details = next(
            (candidate for candidate in statements(cloud, alias) if candidate["Sid"] == statement),
            None,
        )
        if details is None:
            return None
        who = details["Principal"]
        return Observed(
            name,
            {
                "Action": details["Action"],
                "Principal": who.get("AWS", who) if isinstance(who, dict) else who,
            },
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        alias, _, statement = resource.name.partition("|")
        wanted = {"StatementId": statement, **resource.properties, **_alias_args(alias)}
        cloud.call(
            "lambda", "add_permission", f"letting callers of the URL in to {alias}", **wanted
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        alias, _, statement = observed.name.partition("|")
        which = {"StatementId": statement, **_alias_args(alias)}
        cloud.call("lambda", "remove_permission", f"taking a permission from {alias}", **which)


class EventSourceMapping(ResourceKind):
    """A queue whose messages go to an alias; its name is `function:alias|queue`."""

    traits = Traits(
        fixed=frozenset({"EventSourceArn"}),
        unreported=frozenset({"FunctionName"}),
        removable=frozenset({"ScalingConfig"}),
    )
    poll_interval_s, timeout_s = 2.0, 600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        alias, _, queue = name.partition("|")
        details = next(
            (
                candidate
                for candidate in mappings(cloud, alias)
                if candidate["EventSourceArn"] == queue
            ),
            None,
        )
        if details is None:
            return None
        changing = details["State"] not in ("Enabled", "Disabled")
        tags = cloud.call(
            "lambda", "list_tags", "reading tags", Resource=details["EventSourceMappingArn"]
        )["Tags"]
        details = {
            key: value for key, value in details.items() if value != {}
        }  # Lambda reports a removed bound as an empty one
        outputs = {
            "Ref": details["UUID"],
            "Arn": details["EventSourceMappingArn"],
            "status": details["State"],
        }
        return Observed(
            name,
            pick(details, MAPPING),
            tags,
            outputs,
            "changing" if changing else "ready",
            details["State"] if changing else "",
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

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        arguments = {"ScalingConfig": {}, **resource.properties, "UUID": observed.outputs["Ref"]}
        arguments.pop("EventSourceArn")
        doing = f"changing the event source of {arguments['FunctionName']}"
        if changed - {"tags"}:
            cloud.call("lambda", "update_event_source_mapping", doing, **arguments)
        cloud.call(
            "lambda",
            "tag_resource",
            doing,
            Resource=observed.outputs["Arn"],
            Tags=dict(resource.tags),
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        if observed.outputs["status"] != "Deleting":
            doing = f"sending no more messages to {observed.name.partition('|')[0]}"
            cloud.call("lambda", "delete_event_source_mapping", doing, UUID=observed.outputs["Ref"])


class ProvisionedConcurrency(ResourceKind):
    """Environments that start before requests arrive, shared by the versions of an alias.

    Its name is `function:alias`.
    """

    traits = Traits(is_tagged=False, fixed=frozenset({"FunctionName", "Qualifier"}))
    poll_interval_s, timeout_s = 5.0, 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        which = _alias_args(name)
        doing = f"looking for the provisioned concurrency of {name}"
        config = cloud.find("lambda", "get_provisioned_concurrency_config", doing, **which)
        if config is None:
            return None
        wanted = config["RequestedProvisionedConcurrentExecutions"]
        available = config.get("AvailableProvisionedConcurrentExecutions", 0)
        states: dict[str, State] = {"READY": "ready", "FAILED": "failed"}
        state = states.get(config["Status"], "changing")
        reason = (
            ""
            if state == "ready"
            else config.get("StatusReason") or f"{available} of {wanted} are there"
        )
        return Observed(
            name, {**which, "ProvisionedConcurrentExecutions": wanted}, state=state, reason=reason
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = {**resource.change_settings, **resource.properties}
        cloud.call(
            "lambda",
            "put_provisioned_concurrency_config",
            f"keeping environments of {resource.name} ready",
            **wanted,
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        doing = f"keeping no environments of {observed.name} ready"
        cloud.call(
            "lambda", "delete_provisioned_concurrency_config", doing, **_alias_args(observed.name)
        )


class CapacityProvider(ResourceKind):
    """Instances in the user's account that Lambda manages."""

    traits = Traits(fixed=frozenset(PROVIDER[:3]))
    poll_interval_s, timeout_s = 5.0, 1800.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        answer = cloud.find(
            "lambda",
            "get_capacity_provider",
            f"looking for the capacity provider {name}",
            CapacityProviderName=name,
        )
        if answer is None:
            return None
        provider = answer["CapacityProvider"]
        arn = provider["CapacityProviderArn"]
        states: dict[str, State] = {"Active": "ready", "Failed": "failed"}
        tags = cloud.call("lambda", "list_tags", "reading tags", Resource=arn)["Tags"]
        state = states.get(provider["State"], "changing")
        return Observed(
            name,
            pick(provider, PROVIDER),
            tags,
            {"Arn": arn, "Ref": name},
            state,
            "" if state == "ready" else provider["State"],
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

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        doing = f"changing the capacity provider {resource.name}"
        arguments = pick(resource.properties, ("CapacityProviderScalingConfig",))
        if arguments and "CapacityProviderScalingConfig" in changed:
            cloud.call(
                "lambda",
                "update_capacity_provider",
                doing,
                CapacityProviderName=resource.name,
                **arguments,
            )
        cloud.call(
            "lambda",
            "tag_resource",
            doing,
            Resource=observed.outputs["Arn"],
            Tags=dict(resource.tags),
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        if observed.reason != "Deleting":
            doing = f"deleting the capacity provider {observed.name}"
            cloud.call(
                "lambda", "delete_capacity_provider", doing, CapacityProviderName=observed.name
            )


def statements(cloud: Cloud, alias: str) -> list[dict[str, Any]]:
    """Return the statements of the policy of `function:alias`."""
    response = cloud.find(
        "lambda",
        "get_policy",
        f"looking for the callers that {alias} permits",
        **_alias_args(alias),
    )
    return [] if response is None else list(json.loads(response["Policy"])["Statement"])


def mappings(cloud: Cloud, alias: str) -> list[dict[str, Any]]:
    """Return the sources of events for `function:alias`."""
    doing = f"looking for what sends events to {alias}"
    return cloud.list_items(
        "lambda", "list_event_source_mappings", "EventSourceMappings", doing, FunctionName=alias
    )


def _alias_args(alias_name: str) -> dict[str, str]:
    function, _, alias = alias_name.partition(":")
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
