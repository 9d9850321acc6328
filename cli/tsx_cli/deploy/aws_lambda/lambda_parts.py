"""The other resources of a Lambda function: URL, permissions, queue, concurrency, instances."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.aws_lambda.kinds import Alias, LambdaFunction, PublishedVersion
from tsx_cli.deploy.engine.kind import ResourceKind, pick
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits

PROVIDER_PROPERTIES = (
    "PermissionsConfig",
    "VpcConfig",
    "InstanceRequirements",
    "CapacityProviderScalingConfig",
)
URL_PROPERTIES = ("AuthType", "InvokeMode")
MAPPING_PROPERTIES = (
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
        alias_arguments = _alias_arguments(name)
        config = cloud.find(
            "lambda", "get_function_url_config", f"looking for the URL of {name}", **alias_arguments
        )
        if config is None:
            return None
        properties = {
            "TargetFunctionArn": alias_arguments["FunctionName"],
            "Qualifier": alias_arguments["Qualifier"],
            **pick(config, URL_PROPERTIES),
        }
        return Observed(
            name,
            properties,
            outputs={"FunctionUrl": config["FunctionUrl"], "Ref": config["FunctionArn"]},
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        self._write(cloud, "create", resource, f"giving {resource.name} a URL")

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        self._write(cloud, "update", resource, f"changing the URL of {resource.name}")

    def _write(self, cloud: Cloud, verb: str, resource: Resource, doing: str) -> None:
        arguments = {**_alias_arguments(resource.name), **pick(resource.properties, URL_PROPERTIES)}
        cloud.call("lambda", f"{verb}_function_url_config", doing, **arguments)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        cloud.call(
            "lambda",
            "delete_function_url_config",
            f"removing the URL of {observed.name}",
            **_alias_arguments(observed.name),
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
        principal = details["Principal"]
        return Observed(
            name,
            {
                "Action": details["Action"],
                "Principal": principal.get("AWS", principal)
                if isinstance(principal, dict)
                else principal,
            },
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        alias, _, statement = resource.name.partition("|")
        arguments = {"StatementId": statement, **resource.properties, **_alias_arguments(alias)}
        cloud.call(
            "lambda", "add_permission", f"letting callers of the URL in to {alias}", **arguments
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        alias, _, statement = observed.name.partition("|")
        alias_arguments = {"StatementId": statement, **_alias_arguments(alias)}
        cloud.call(
            "lambda", "remove_permission", f"taking a permission from {alias}", **alias_arguments
        )


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
        is_changing = details["State"] not in ("Enabled", "Disabled")
        tags = cloud.call(
            "lambda", "list_tags", "reading tags", Resource=details["EventSourceMappingArn"]
        )["Tags"]
        # Lambda reports a removed limit as an empty mapping.
        details = {key: value for key, value in details.items() if value != {}}
        outputs = {
            "Ref": details["UUID"],
            "Arn": details["EventSourceMappingArn"],
            "status": details["State"],
        }
        return Observed(
            name,
            pick(details, MAPPING_PROPERTIES),
            tags,
            outputs,
            "changing" if is_changing else "ready",
            details["State"] if is_changing else "",
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
        _set_tags(cloud, doing, observed, resource)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        if observed.outputs["status"] != "Deleting":
            doing = f"sending no more messages to {observed.name.partition('|')[0]}"
            cloud.call("lambda", "delete_event_source_mapping", doing, UUID=observed.outputs["Ref"])


class ProvisionedConcurrency(ResourceKind):
    """Execution environments that start before requests arrive, for all versions of an alias.

    Its name is `function:alias`.
    """

    traits = Traits(is_tagged=False, fixed=frozenset({"FunctionName", "Qualifier"}))
    poll_interval_s, timeout_s = 5.0, 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        alias_arguments = _alias_arguments(name)
        doing = f"looking for the provisioned concurrency of {name}"
        config = cloud.find(
            "lambda", "get_provisioned_concurrency_config", doing, **alias_arguments
        )
        if config is None:
            return None
        requested = config["RequestedProvisionedConcurrentExecutions"]
        available = config.get("AvailableProvisionedConcurrentExecutions", 0)
        states: dict[str, State] = {"READY": "ready", "FAILED": "failed"}
        state = states.get(config["Status"], "changing")
        reason = (
            ""
            if state == "ready"
            else config.get("StatusReason") or f"{available} of {requested} are there"
        )
        return Observed(
            name,
            {**alias_arguments, "ProvisionedConcurrentExecutions": requested},
            state=state,
            reason=reason,
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        arguments = {**resource.change_settings, **resource.properties}
        cloud.call(
            "lambda",
            "put_provisioned_concurrency_config",
            f"keeping environments of {resource.name} ready",
            **arguments,
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        doing = f"keeping no environments of {observed.name} ready"
        cloud.call(
            "lambda",
            "delete_provisioned_concurrency_config",
            doing,
            **_alias_arguments(observed.name),
        )


class CapacityProvider(ResourceKind):
    """Instances in the user's account that Lambda manages."""

    traits = Traits(fixed=frozenset(PROVIDER_PROPERTIES[:3]))
    poll_interval_s, timeout_s = 5.0, 1800.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        response = cloud.find(
            "lambda",
            "get_capacity_provider",
            f"looking for the capacity provider {name}",
            CapacityProviderName=name,
        )
        if response is None:
            return None
        provider = response["CapacityProvider"]
        arn = provider["CapacityProviderArn"]
        states: dict[str, State] = {"Active": "ready", "Failed": "failed"}
        tags = cloud.call("lambda", "list_tags", "reading tags", Resource=arn)["Tags"]
        state = states.get(provider["State"], "changing")
        return Observed(
            name,
            pick(provider, PROVIDER_PROPERTIES),
            tags,
            {"Arn": arn, "Ref": name},
            state,
            "" if state == "ready" else provider["State"],
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        arguments = {
            "CapacityProviderName": resource.name,
            "Tags": dict(resource.tags),
            **resource.properties,
        }
        cloud.call(
            "lambda",
            "create_capacity_provider",
            f"creating the capacity provider {resource.name}",
            **arguments,
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
        _set_tags(cloud, doing, observed, resource)

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        if observed.reason != "Deleting":
            doing = f"deleting the capacity provider {observed.name}"
            cloud.call(
                "lambda", "delete_capacity_provider", doing, CapacityProviderName=observed.name
            )


def _set_tags(cloud: Cloud, doing: str, observed: Observed, resource: Resource) -> None:
    arn, tags = observed.outputs["Arn"], dict(resource.tags)
    cloud.call("lambda", "tag_resource", doing, Resource=arn, Tags=tags)


def statements(cloud: Cloud, alias: str) -> list[dict[str, Any]]:
    """Return the statements of the policy of `function:alias`."""
    response = cloud.find(
        "lambda",
        "get_policy",
        f"looking for the callers that {alias} permits",
        **_alias_arguments(alias),
    )
    return [] if response is None else list(json.loads(response["Policy"])["Statement"])


def mappings(cloud: Cloud, alias: str) -> list[dict[str, Any]]:
    """Return the event source mappings of `function:alias`."""
    doing = f"looking for what sends events to {alias}"
    return cloud.list_items(
        "lambda", "list_event_source_mappings", "EventSourceMappings", doing, FunctionName=alias
    )


def _alias_arguments(alias_name: str) -> dict[str, str]:
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
