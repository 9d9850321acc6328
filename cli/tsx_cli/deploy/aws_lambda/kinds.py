"""Lambda functions, their versions, and the alias that receives requests.

The other resources of a function are in `lambda_parts`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tsx_cli.deploy.aws.kinds.iam import call_with_role
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.canary import Baking, Shift, decide
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind, pick
from tsx_cli.deploy.engine.resources import UNDER_WAY, Observed, Resource, State, Traits

CODE_PROPERTIES = ("ImageUri", "Architectures")
CONFIGURATION_PROPERTIES = (
    "Role",
    "Description",
    "Timeout",
    "MemorySize",
    "EphemeralStorage",
    "CapacityProviderConfig",
    "AcceleratorConfig",
)
RESERVED = "ReservedConcurrentExecutions"
DESCRIPTION_PREFIX = "canary since "
WHEN_INTERRUPTED = (
    "a canary that has begun keeps its share of the requests, and its alarms are not checked until"
    " this command runs again. `tsx deploy promote` gives it all requests, `tsx deploy rollback`"
    " removes its share"
)


class LambdaFunction(ResourceKind):
    """A function.

    Requests go to the versions of a function, so a change takes effect with the next version.
    """

    traits = Traits(
        fixed=frozenset({"PackageType"}),
        removable=frozenset({RESERVED, "CapacityProviderConfig"}),
        exact=frozenset({"Environment", "VpcConfig", "Layers"}),
    )
    poll_interval_s, timeout_s = 2.0, 900.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        response = cloud.find(
            "lambda", "get_function", f"looking for the function {name}", FunctionName=name
        )
        if response is None:
            return None
        config = response["Configuration"]
        properties = pick(config, ("PackageType", *CODE_PROPERTIES[1:], *CONFIGURATION_PROPERTIES))
        properties["Code"] = pick(response["Code"], ("ImageUri",))
        if config.get("Environment", {}).get("Variables"):
            properties["Environment"] = {"Variables": config["Environment"]["Variables"]}
        if config.get("VpcConfig", {}).get("SubnetIds"):
            properties["VpcConfig"] = {
                key: sorted(config["VpcConfig"].get(key, []))
                for key in ("SubnetIds", "SecurityGroupIds")
            }
        if config.get("Layers"):
            properties["Layers"] = [layer["Arn"] for layer in config["Layers"]]
        reserved = response.get("Concurrency", {}).get(RESERVED)
        if reserved is not None:
            properties[RESERVED] = reserved
        state, reason = condition(config)
        outputs = {
            "Arn": config["FunctionArn"],
            "Ref": name,
            "status": config.get("State", "Active"),
            "configuration": config,
        }
        return Observed(name, properties, response.get("Tags", {}), outputs, state, reason)

    def create(self, cloud: Cloud, resource: Resource) -> str | None:
        arguments = {key: value for key, value in resource.properties.items() if key != RESERVED}
        arguments |= {"FunctionName": resource.name, "Tags": dict(resource.tags)}
        doing = f"creating the function {resource.name}"
        return call_with_role(
            cloud, "lambda", "create_function", doing, str(arguments["Role"]), **arguments
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> str | None:
        """Update a function with one call at a time.

        The description is updated after the image, because it contains a hash of both.
        """
        properties, name = resource.properties, {"FunctionName": resource.name}
        if changed & {"Code", "Architectures"}:
            code = {**name, **properties["Code"], "Architectures": properties["Architectures"]}
            cloud.call(
                "lambda", "update_function_code", f"giving {resource.name} its image", **code
            )
            return "has its image" if len(changed - {"Code", "Architectures"}) else None
        if changed - {RESERVED, "tags"}:
            configuration = {
                **name,
                "Environment": {"Variables": {}},
                "VpcConfig": {"SubnetIds": [], "SecurityGroupIds": []},
            }
            configuration |= pick(
                properties, (*CONFIGURATION_PROPERTIES, "Environment", "VpcConfig")
            ) | ({"Layers": []} if "Layers" in changed else {})
            operation, doing = "update_function_configuration", f"configuring {resource.name}"
            role = str(properties["Role"])
            if text := call_with_role(cloud, "lambda", operation, doing, role, **configuration):
                raise CloudError(text)
            return "is configured" if changed & {RESERVED, "tags"} else None
        if RESERVED in changed:
            operation = (
                "put_function_concurrency"
                if RESERVED in properties
                else "delete_function_concurrency"
            )
            cloud.call(
                "lambda",
                operation,
                f"keeping concurrency for {resource.name}",
                **name,
                **pick(properties, [RESERVED]),
            )
        if "tags" in changed:
            arguments = {"Resource": observed.outputs["Arn"], "Tags": dict(resource.tags)}
            cloud.call("lambda", "tag_resource", f"tagging {resource.name}", **arguments)
        return None

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        doing = f"deleting the function {observed.name}, its versions, its alias and its URL"
        cloud.call("lambda", "delete_function", doing, FunctionName=observed.name)


class PublishedVersion(ResourceKind):
    """A version; its name is `function:hash`, with the hash in its description."""

    traits = Traits(is_tagged=False, unreported=frozenset({"FunctionName"}))
    poll_interval_s, timeout_s = 2.0, 1800.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        function, _, content_hash = name.partition(":")
        version = next(
            (
                version
                for version in versions_of(cloud, function)
                if hash_of(version) == content_hash
            ),
            None,
        )  # Versions without a hash were published by hand.
        if version is None:
            return None
        state, reason = condition(version)
        return Observed(
            name,
            {},
            outputs={"Version": version["Version"], "Ref": version["FunctionArn"]},
            state=state,
            reason=reason,
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        function = resource.properties["FunctionName"]
        cloud.call(
            "lambda", "publish_version", f"making a version of {function}", FunctionName=function
        )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        function, _, content_hash = observed.name.partition(":")
        for number in [
            version["Version"]
            for version in versions_of(cloud, function)
            if hash_of(version) == content_hash
        ]:
            cloud.call(
                "lambda",
                "delete_function",
                f"deleting version {number} of {function}",
                FunctionName=function,
                Qualifier=number,
            )


class Alias(ResourceKind):
    """An alias; its name is `function:alias`.

    A canary is a second version with a percentage of the requests. tsx watches it, because Lambda
    does not. The alias's description contains the start of the canary, so that any run can continue
    it.
    """

    traits = Traits(
        is_tagged=False, removable=frozenset({"RoutingConfig"}), when_interrupted=WHEN_INTERRUPTED
    )
    poll_interval_s, timeout_s = 10.0, 2 * 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        function, _, alias = name.partition(":")
        details = cloud.find(
            "lambda",
            "get_alias",
            f"looking for the alias {name}",
            FunctionName=function,
            Name=alias,
        )
        if details is None:
            return None
        properties = {
            "FunctionName": function,
            "Name": alias,
            "FunctionVersion": details["FunctionVersion"],
        }
        weights = (details.get("RoutingConfig") or {}).get("AdditionalVersionWeights")
        if weights:
            properties["RoutingConfig"] = {"AdditionalVersionWeights": weights}
        canary = _running_canary(details)
        return Observed(
            name,
            properties,
            outputs={"Ref": details["AliasArn"], **({} if canary is None else {UNDER_WAY: canary})},
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        cloud.call(
            "lambda", "create_alias", f"creating the alias {resource.name}", **resource.properties
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> str | None:
        new_version = resource.properties["FunctionVersion"]
        old_version = observed.properties["FunctionVersion"]
        shift = (
            Shift(**resource.change_settings)
            if resource.change_settings and new_version != old_version
            else None
        )
        baking: Baking | None = observed.outputs.get(UNDER_WAY)
        time = now()
        triggered_alarms = (
            {}
            if shift is None
            else find_triggered_alarms(
                cloud,
                shift.alarms,
                None if baking is None or baking.version != new_version else baking.since,
            )
        )
        step = decide(new_version, shift, baking, triggered_alarms, time)
        if step.action == "wait":
            return f"version {new_version} has {step.text}"
        if step.action == "begin":
            _route(
                cloud,
                resource,
                old_version,
                {new_version: step.percent / 100},
                f"{DESCRIPTION_PREFIX}{time.isoformat(timespec='seconds')}",
            )
            return f"version {new_version} has {step.percent:g} % of the requests"
        if step.action == "rollback":
            if baking is not None:
                _route(cloud, resource, old_version, {}, "")
            raise CloudError(
                f"version {old_version} has all requests{'' if baking is None else ' again'}:"
                f" {step.text}"
            )
        _route(cloud, resource, new_version, {}, "")
        return None

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        function, _, alias = observed.name.partition(":")
        cloud.call(
            "lambda",
            "delete_alias",
            f"deleting the alias {observed.name}",
            FunctionName=function,
            Name=alias,
        )


def now() -> datetime:
    return datetime.now(timezone.utc)


def condition(config: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of a function or version, and the reason.

    A failed change leaves the function as it was, so only a failed creation means `failed`.
    """
    state = config.get("State", "Active")
    update_status = config.get("LastUpdateStatus", "Successful")
    if state == "Failed":
        return "failed", config.get("StateReason", "")
    if state in ("Pending", "Deleting") or update_status == "InProgress":
        return (
            "changing",
            config.get("StateReason")
            or config.get("LastUpdateStatusReason")
            or "Lambda prepares it",
        )
    reason = config.get("LastUpdateStatusReason", "") if update_status == "Failed" else ""
    return "ready", reason


def versions_of(cloud: Cloud, function: str) -> list[dict[str, Any]]:
    """Return the published versions, oldest first."""
    doing = f"listing the versions of {function}"
    versions = cloud.list_items(
        "lambda", "list_versions_by_function", "Versions", doing, FunctionName=function
    )
    return sorted(
        (version for version in versions if version["Version"] != "$LATEST"),
        key=lambda version: int(version["Version"]),
    )


def hash_of(config: Mapping[str, Any]) -> str:
    parts = config.get("Description", "").split()
    return parts[1] if len(parts) > 1 and parts[0] == "tsx" else ""


def find_triggered_alarms(
    cloud: Cloud, alarms: Sequence[str], since: datetime | None
) -> dict[str, str]:
    """Return the alarms that are triggered, or have been since a time, with CloudWatch's reasons.

    Raises:
        CloudError: An alarm does not exist, or CloudWatch refused.
    """
    if not alarms:
        return {}
    doing = "looking at the alarms"
    arguments: dict[str, Any] = {
        "AlarmNames": list(alarms),
        "AlarmTypes": ["MetricAlarm", "CompositeAlarm"],
    }
    response = cloud.call("cloudwatch", "describe_alarms", doing, **arguments)
    alarms_by_name = {
        alarm["AlarmName"]: alarm
        for kind in ("MetricAlarms", "CompositeAlarms")
        for alarm in response.get(kind, [])
    }
    missing = [name for name in alarms if name not in alarms_by_name]
    if missing:
        raise CloudError(
            f"there is no alarm '{missing[0]}'; --alarm takes 5xx>0, p95>300ms, or the name of an"
            " existing alarm"
        )
    reasons = {
        name: alarm.get("StateReason", "")
        for name, alarm in alarms_by_name.items()
        if alarm.get("StateValue") == "ALARM"
    }
    for name in alarms if since is not None else ():
        arguments = {"AlarmName": name, "HistoryItemType": "StateUpdate", "StartDate": since}
        items = cloud.call("cloudwatch", "describe_alarm_history", doing, **arguments)[
            "AlarmHistoryItems"
        ]
        changes = [item for item in items if _is_trigger(item) and item["Timestamp"] >= since]
        if changes:
            reasons.setdefault(name, f"at {changes[0]['Timestamp'].isoformat(timespec='seconds')}")
    return reasons


def _is_trigger(item: Mapping[str, Any]) -> bool:
    return bool(
        json.loads(item.get("HistoryData") or "{}").get("newState", {}).get("stateValue") == "ALARM"
    )


def _running_canary(alias: Mapping[str, Any]) -> Baking | None:
    weights = (alias.get("RoutingConfig") or {}).get("AdditionalVersionWeights") or {}
    start = alias.get("Description", "").removeprefix(DESCRIPTION_PREFIX)
    for version, weight in weights.items():
        try:
            return Baking(version, weight * 100, datetime.fromisoformat(start))
        except ValueError:  # Somebody else began the canary, so its age is unknown.
            return Baking(version, weight * 100, datetime.fromtimestamp(0, timezone.utc))
    return None


def _route(
    cloud: Cloud, resource: Resource, version: str, weights: Mapping[str, float], description: str
) -> None:
    arguments = {
        **pick(resource.properties, ("FunctionName", "Name")),
        "FunctionVersion": version,
        "Description": description,
    }
    arguments["RoutingConfig"] = {"AdditionalVersionWeights": dict(weights)}
    cloud.call("lambda", "update_alias", f"moving requests of {resource.name}", **arguments)
