"""Lambda functions, their versions, and the alias that receives requests.

`lambda_parts` has the related resources.
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

CODE = ("ImageUri", "Architectures")
CONFIGURATION = (
    "Role",
    "Description",
    "Timeout",
    "MemorySize",
    "EphemeralStorage",
    "CapacityProviderConfig",
    "AcceleratorConfig",
)
RESERVED = "ReservedConcurrentExecutions"
MARK = "canary since "
WHEN_INTERRUPTED = (
    "a canary that has begun keeps its share of the requests, and its alarms are not checked until"
    " this command runs again. `tsx deploy promote` gives it all requests, `tsx deploy rollback`"
    " removes its share"
)


class LambdaFunction(ResourceKind):
    """A function. Requests go to versions, so changes take effect with the next version."""

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
        properties = pick(config, ("PackageType", *CODE[1:], *CONFIGURATION))
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
        wanted = {key: value for key, value in resource.properties.items() if key != RESERVED}
        wanted |= {"FunctionName": resource.name, "Tags": dict(resource.tags)}
        doing = f"creating the function {resource.name}"
        return call_with_role(
            cloud, "lambda", "create_function", doing, str(wanted["Role"]), **wanted
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> str | None:
        """Update a function with one call at a time.

        The description contains a hash of the function, so it comes after the image.
        """
        wanted, name = resource.properties, {"FunctionName": resource.name}
        if changed & {"Code", "Architectures"}:
            code = {**name, **wanted["Code"], "Architectures": wanted["Architectures"]}
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
            configuration |= pick(wanted, (*CONFIGURATION, "Environment", "VpcConfig")) | (
                {"Layers": []} if "Layers" in changed else {}
            )
            operation, doing = "update_function_configuration", f"configuring {resource.name}"
            role = str(wanted["Role"])
            if text := call_with_role(cloud, "lambda", operation, doing, role, **configuration):
                raise CloudError(text)
            return "is configured" if changed & {RESERVED, "tags"} else None
        if RESERVED in changed:
            operation = (
                "put_function_concurrency" if RESERVED in wanted else "delete_function_concurrency"
            )
            cloud.call(
                "lambda",
                operation,
                f"keeping concurrency for {resource.name}",
                **name,
                **pick(wanted, [RESERVED]),
            )
        if "tags" in changed:
            which = {"Resource": observed.outputs["Arn"], "Tags": dict(resource.tags)}
            cloud.call("lambda", "tag_resource", f"tagging {resource.name}", **which)
        return None

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        doing = f"deleting the function {observed.name}, its versions, its alias and its URL"
        cloud.call("lambda", "delete_function", doing, FunctionName=observed.name)


class PublishedVersion(ResourceKind):
    """A version; its name is `function:hash`, with the hash in its description."""

    traits = Traits(is_tagged=False, unreported=frozenset({"FunctionName"}))
    poll_interval_s, timeout_s = 2.0, 1800.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        function, _, content = name.partition(":")
        version = next(
            (version for version in versions_of(cloud, function) if hash_of(version) == content),
            None,
        )  # others were published by hand
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
        function, _, content = observed.name.partition(":")
        for number in [
            version["Version"]
            for version in versions_of(cloud, function)
            if hash_of(version) == content
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

    A canary is a second version with a share of the requests. tsx watches it, because Lambda does
    not. The alias's description holds the start of the canary, so that any run can continue it.
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
        canary = _baking(details)
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
        wanted = resource.properties["FunctionVersion"]
        before = observed.properties["FunctionVersion"]
        shift = (
            Shift(**resource.change_settings)
            if resource.change_settings and wanted != before
            else None
        )
        baking: Baking | None = observed.outputs.get(UNDER_WAY)
        time = now()
        off = (
            {}
            if shift is None
            else went_off(
                cloud,
                shift.alarms,
                None if baking is None or baking.version != wanted else baking.since,
            )
        )
        todo = decide(wanted, shift, baking, off, time)
        if todo.action == "wait":
            return f"version {wanted} has {todo.text}"
        if todo.action == "begin":
            _route(
                cloud,
                resource,
                before,
                {wanted: todo.percent / 100},
                f"{MARK}{time.isoformat(timespec='seconds')}",
            )
            return f"version {wanted} has {todo.percent:g} % of the requests"
        if todo.action == "rollback":
            if baking is not None:
                _route(cloud, resource, before, {}, "")
            raise CloudError(
                f"version {before} has all requests{'' if baking is None else ' again'}:"
                f" {todo.text}"
            )
        _route(cloud, resource, wanted, {}, "")
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

    A failed change leaves a function as it was. Only a failed creation makes a function fail.
    """
    state, last = config.get("State", "Active"), config.get("LastUpdateStatus", "Successful")
    if state == "Failed":
        return "failed", config.get("StateReason", "")
    if state in ("Pending", "Deleting") or last == "InProgress":
        return (
            "changing",
            config.get("StateReason")
            or config.get("LastUpdateStatusReason")
            or "Lambda prepares it",
        )
    return "ready", config.get("LastUpdateStatusReason", "") if last == "Failed" else ""


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


def went_off(cloud: Cloud, alarms: Sequence[str], since: datetime | None) -> dict[str, str]:
    """Return the alarms that are off, or were since a time, with CloudWatch's reasons.

    Raises:
        CloudError: An alarm does not exist, or CloudWatch refused.
    """
    if not alarms:
        return {}
    doing = "looking at the alarms"
    which: dict[str, Any] = {
        "AlarmNames": list(alarms),
        "AlarmTypes": ["MetricAlarm", "CompositeAlarm"],
    }
    answer = cloud.call("cloudwatch", "describe_alarms", doing, **which)
    alarms_by_name = {
        alarm["AlarmName"]: alarm
        for kind in ("MetricAlarms", "CompositeAlarms")
        for alarm in answer.get(kind, [])
    }
    missing = [name for name in alarms if name not in alarms_by_name]
    if missing:
        raise CloudError(
            f"there is no alarm '{missing[0]}'; --alarm takes 5xx>0, p95>300ms, or the name of an"
            " existing alarm"
        )
    off = {
        name: alarm.get("StateReason", "")
        for name, alarm in alarms_by_name.items()
        if alarm.get("StateValue") == "ALARM"
    }
    for name in alarms if since is not None else ():
        which = {"AlarmName": name, "HistoryItemType": "StateUpdate", "StartDate": since}
        items = cloud.call("cloudwatch", "describe_alarm_history", doing, **which)[
            "AlarmHistoryItems"
        ]
        changes = [item for item in items if _is_off(item) and item["Timestamp"] >= since]
        if changes:
            off.setdefault(name, f"at {changes[0]['Timestamp'].isoformat(timespec='seconds')}")
    return off


def _is_off(item: Mapping[str, Any]) -> bool:
    return bool(
        json.loads(item.get("HistoryData") or "{}").get("newState", {}).get("stateValue") == "ALARM"
    )


def _baking(alias: Mapping[str, Any]) -> Baking | None:
    weights = (alias.get("RoutingConfig") or {}).get("AdditionalVersionWeights") or {}
    properties = alias.get("Description", "").removeprefix(MARK)
    for version, weight in weights.items():
        try:
            return Baking(version, weight * 100, datetime.fromisoformat(properties))
        except ValueError:  # somebody else began it, so its age is unknown
            return Baking(version, weight * 100, datetime.fromtimestamp(0, timezone.utc))
    return None


def _route(
    cloud: Cloud, resource: Resource, version: str, weights: Mapping[str, float], description: str
) -> None:
    wanted = {
        **pick(resource.properties, ("FunctionName", "Name")),
        "FunctionVersion": version,
        "Description": description,
    }
    wanted["RoutingConfig"] = {"AdditionalVersionWeights": dict(weights)}
    cloud.call("lambda", "update_alias", f"moving requests of {resource.name}", **wanted)
