"""A deployment as a Lambda function: its resources, versions and health."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.kinds.autoscaling import (
    ScalableTarget,
    existing_scaling_resources,
    scaled_dimensions,
    without_foreign_scaling,
)
from tsx_cli.deploy.aws.kinds.cloudwatch import alarm_states, alarms_of
from tsx_cli.deploy.aws.kinds.iam import own_role
from tsx_cli.deploy.aws.session import Cloud, translate_errors
from tsx_cli.deploy.aws_lambda.kinds import hash_of, versions_of
from tsx_cli.deploy.aws_lambda.lambda_parts import KINDS, mappings, statements
from tsx_cli.deploy.aws_lambda.resources import (
    ALIAS,
    alias_of,
    resources,
    scaling_rule,
    scaling_target,
)
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Observed, Resource, ids_of, numbered_resources, owned
from tsx_cli.deploy.spec import DeploySpec

FIRST_ERROR_STATUS = 400
HEAD_SEPARATOR = b"\0" * 8  # separates head and body of a streamed response


class LambdaPlatform:
    def wanted_resources(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return resources(spec, facts)

    def existing_resources(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        """Return the resources of a function; its versions, alias and URL are deleted with it."""
        function = _function(cloud, name)
        provider = Resource("CapacityProvider", "AWS::Lambda::CapacityProvider", f"tsx-{name}", {})
        existing = own_role(cloud, name, "lambda")
        existing += [provider] if owned(_observe(cloud, provider), name) else []
        if function is not None:
            existing.append(
                Resource("Function", "AWS::Lambda::Function", name, {}, ids_of(existing))
            )
            existing += [
                resource
                for resource in _related_resources(cloud, name)
                if resource.kind not in ("AWS::Lambda::Url", "AWS::Lambda::Permission")
            ]
        return [*existing, *_alarms(cloud, name)]

    def obsolete_resources(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        """Return unwanted resources, and versions beyond the newest `keep`.

        Deletions come last in a plan, so these versions get no requests when they are deleted.
        """
        if _function(cloud, spec.name) is None:
            return []
        names = {(resource.kind, resource.name) for resource in wanted}
        other_resources = [
            resource
            for resource in (*_related_resources(cloud, spec.name), *_alarms(cloud, spec.name))
            if (resource.kind, resource.name) not in names
        ]
        other_resources = without_foreign_scaling(cloud, other_resources, scaling_rule(spec.name))
        new_names = {name for kind, name in names if kind == "AWS::Lambda::Version"}
        earlier_versions = [
            version
            for version in self.versions(cloud, spec.name)
            if f"{spec.name}:{version.id}" not in new_names
        ]
        surplus_versions = {
            version.id: version for version in earlier_versions[: -(spec.keep - 1) or None]
        }.values()
        kind = "AWS::Lambda::Version"
        return [
            *(
                Resource(f"Version{version.number}", kind, f"{spec.name}:{version.id}", {})
                for version in surplus_versions
            ),
            *other_resources,
        ]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        current, canary = _alias(cloud, name)
        configs = [config for config in versions_of(cloud, name) if hash_of(config)]
        return [
            DeployedVersion(
                int(config["Version"]),
                hash_of(config),
                # The slice removes fractions and +0000.
                datetime.fromisoformat(config["LastModified"][:19]).replace(tzinfo=timezone.utc),
                _tags_in_description(config),
                config["Version"] == current,
                canary.get(config["Version"], 0.0),
            )
            for config in configs
        ]

    def rollback_resources(
        self, cloud: Cloud, name: str, version: DeployedVersion
    ) -> list[Resource]:
        return [_alias_resource(name, str(version.number))]

    def promotion_resources(self, cloud: Cloud, name: str) -> list[Resource]:
        _, canary = _alias(cloud, name)
        if not canary:
            raise CliError(f"{name} has no canary: one version has all requests")
        return [_alias_resource(name, next(iter(canary)))]

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        function = _function(cloud, name)
        if function is None:
            return None
        current, canary = _alias(cloud, name)
        versions = {config["Version"]: config for config in versions_of(cloud, name)}
        current_config = versions.get(current, {})
        url = KINDS["AWS::Lambda::Url"].observe(cloud, alias_of(name))
        provisioned = KINDS["Tsx::Lambda::ProvisionedConcurrency"].observe(cloud, alias_of(name))
        return {
            "region": cloud.region,
            "status": function.outputs["status"],
            "reason": "" if function.state == "changing" else function.reason,
            "model": _tags_in_description(current_config).get("tsx:model"),
            "version": current,
            "canary": [
                {"version": key, "percent": percent, **_model(versions.get(key, {}))}
                for key, percent in canary.items()
            ],
            "memory": current_config.get("MemorySize"),
            "timeout": current_config.get("Timeout"),
            "url": None if url is None else url.outputs["FunctionUrl"],
            "queues": [
                {"arn": mapping["EventSourceArn"], "state": mapping["State"]}
                for mapping in mappings(cloud, alias_of(name))
            ],
            "provisioned": (
                None
                if provisioned is None
                else provisioned.properties["ProvisionedConcurrentExecutions"]
            ),
            "alarms": alarm_states(cloud, alarms_of(cloud, name, "FunctionName")),
            "scales": scaled_dimensions(_scaling_resources(cloud, name)),
        }

    def invoke(
        self, cloud: Cloud, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        """Send a request to the alias, as its URL would.

        Raises:
            CloudError: The function failed, or responded with an error.
        """
        event = json.dumps(_event(body, content_type, accept)).encode()
        with translate_errors(f"asking {name}"):
            response = cloud.client("lambda").invoke(
                FunctionName=name, Qualifier=ALIAS, Payload=event
            )
            head, separator, streamed_body = response["Payload"].read().partition(HEAD_SEPARATOR)
        payload = json.loads(head or b"null")
        if "FunctionError" in response:
            raise CloudError(
                f"{name} failed:"
                f" {payload.get('errorMessage', payload) if isinstance(payload, dict) else payload}",
                response["FunctionError"],
            )
        if not isinstance(payload, dict) or "statusCode" not in payload:
            return Response.complete(json.dumps(payload).encode(), "application/json")
        text = payload.get("body") or ""
        content = (
            streamed_body
            if separator
            else base64.b64decode(text)
            if payload.get("isBase64Encoded")
            else text.encode()
        )
        if int(payload["statusCode"]) >= FIRST_ERROR_STATUS:
            raise CloudError(
                f"{name} answered {payload['statusCode']}: {content.decode(errors='replace')}",
                str(payload["statusCode"]),
            )
        return Response.complete(content, payload.get("headers", {}).get("content-type"))


def _function(cloud: Cloud, name: str) -> Observed | None:
    """Return the function of a deployment, or None if another deployment owns it."""
    return owned(KINDS["AWS::Lambda::Function"].observe(cloud, name), name)


def _observe(cloud: Cloud, resource: Resource) -> Observed | None:
    return KINDS[resource.kind].observe(cloud, resource.name)


def _alias(cloud: Cloud, name: str) -> tuple[str, dict[str, float]]:
    """Return the version of the alias, and the percentages of its additional versions."""
    alias = KINDS["AWS::Lambda::Alias"].observe(cloud, alias_of(name))
    if alias is None:
        return "", {}
    weights: Mapping[str, float] = alias.properties.get("RoutingConfig", {}).get(
        "AdditionalVersionWeights", {}
    )
    return alias.properties["FunctionVersion"], {
        version: round(weight * 100, 2) for version, weight in weights.items()
    }


def _alias_resource(name: str, version: str) -> Resource:
    return Resource(
        "Alias",
        "AWS::Lambda::Alias",
        alias_of(name),
        {"FunctionName": name, "Name": ALIAS, "FunctionVersion": version},
    )


def _model(config: Mapping[str, Any]) -> dict[str, str]:
    tags = _tags_in_description(config)
    return {"model": tags["tsx:model"]} if tags else {}


def _tags_in_description(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags in the description of a version, which has no tags of its own."""
    parts = config.get("Description", "").split(maxsplit=3)
    if len(parts) != 4 or parts[0] != "tsx":
        return {}
    return {"tsx:model-sha": parts[2], "tsx:model": parts[3]}


def _related_resources(cloud: Cloud, name: str) -> list[Resource]:
    """Return the resources that belong to a function, such as its URL and its queues."""
    alias, needs = alias_of(name), ("Function",)
    existing = []
    for id, kind in (
        ("Url", "AWS::Lambda::Url"),
        ("Provisioned", "Tsx::Lambda::ProvisionedConcurrency"),
    ):
        if KINDS[kind].observe(cloud, alias) is not None:
            existing.append(Resource(id, kind, alias, {}, needs))
    kind = "AWS::Lambda::Permission"
    own_names = [
        f"{alias}|{statement['Sid']}"
        for statement in statements(cloud, alias)
        if re.fullmatch("tsx-[0-9a-f]{8}", statement["Sid"])
    ]
    existing += numbered_resources("Permission", kind, own_names, needs, start=1)
    kind = "AWS::Lambda::EventSourceMapping"
    queues = [f"{alias}|{mapping['EventSourceArn']}" for mapping in mappings(cloud, alias)]
    for queue in numbered_resources("Queue", kind, queues, needs, start=1):
        if owned(_observe(cloud, queue), name):
            existing.append(queue)
    return [*existing, *_scaling_resources(cloud, name)]


def _scaling_resources(cloud: Cloud, name: str) -> list[Resource]:
    if ScalableTarget().observe(cloud, scaling_target(name)) is None:
        return []
    return existing_scaling_resources(
        scaling_target(name), scaling_rule(name), ("Function", "Provisioned")
    )


def _alarms(cloud: Cloud, name: str) -> list[Resource]:
    names = alarms_of(cloud, name, "FunctionName")
    return numbered_resources("Alarm", "AWS::CloudWatch::Alarm", names, start=1)


def _event(body: bytes, content_type: str, accept: str | None) -> dict[str, Any]:
    """Return a request in the form that a function's URL sends: payload 2.0 of API Gateway."""
    headers = {"content-type": content_type, **({"accept": accept} if accept else {})}
    http = {
        "method": "POST",
        "path": "/invocations",
        "protocol": "HTTP/1.1",
        "sourceIp": "127.0.0.1",
        "userAgent": "tsx deploy",
    }
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": http["path"],
        "rawQueryString": "",
        "headers": headers,
        "requestContext": {
            "http": http,
            "domainName": "localhost",
            "requestId": "tsx",
            "routeKey": "$default",
            "stage": "$default",
        },
        "body": base64.b64encode(body).decode(),
        "isBase64Encoded": True,
    }
