"""The state of a Lambda function: its resources, its earlier versions, its health."""

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
    scales,
    scaling_of,
    without_others,
)
from tsx_cli.deploy.aws.kinds.cloudwatch import alarm_states, alarms_of
from tsx_cli.deploy.aws.kinds.iam import own_role
from tsx_cli.deploy.aws.logs import GROUPS
from tsx_cli.deploy.aws.session import Cloud, translated_errors
from tsx_cli.deploy.aws_lambda.kinds import hash_of, published
from tsx_cli.deploy.aws_lambda.lambda_parts import KINDS, mappings, statements
from tsx_cli.deploy.aws_lambda.resources import ALIAS, alias_of, resources, scaled, scaling_rule
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Observed, Resource, numbered
from tsx_cli.deploy.spec import DeploySpec

REFUSED = 400
END_OF_HEAD = b"\0" * 8  # of an answer that is streamed: what comes behind it is the body


class LambdaTarget:
    def log_group(self, name: str) -> str:
        return GROUPS["lambda"].format(name)

    def wanted(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return resources(spec, facts)

    def belongings(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        """A function takes its versions, its alias and its URL with it."""
        function = _function(cloud, name)
        provider = Resource("CapacityProvider", "AWS::Lambda::CapacityProvider", f"tsx-{name}", {})
        seen = _observed(cloud, provider)
        found = own_role(cloud, name, "lambda")
        found += [provider] if seen is not None and seen.tags.get("tsx:name") == name else []
        if function is not None:
            found.append(
                Resource(
                    "Function", "AWS::Lambda::Function", name, {}, tuple(each.id for each in found)
                )
            )
            found += [
                each
                for each in _beside(cloud, name)
                if each.kind not in ("AWS::Lambda::Url", "AWS::Lambda::Permission")
            ]
        return [*found, *_alarms(cloud, name)]

    def obsolete(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        """What is not asked for any more, and versions beyond the newest `keep`: none has requests
        by then, as deletions come last.
        """
        if _function(cloud, spec.name) is None:
            return []
        names = {(each.kind, each.name) for each in wanted}
        beside = [
            each
            for each in (*_beside(cloud, spec.name), *_alarms(cloud, spec.name))
            if (each.kind, each.name) not in names
        ]
        beside = without_others(cloud, beside, scaling_rule(spec.name))
        coming = {name for kind, name in names if kind == "AWS::Lambda::Version"}
        others = [
            each
            for each in self.versions(cloud, spec.name)
            if f"{spec.name}:{each.id}" not in coming
        ]
        gone = {each.id: each for each in others[: -(spec.keep - 1) or None]}.values()
        kind = "AWS::Lambda::Version"
        return [
            *(
                Resource(f"Version{each.number}", kind, f"{spec.name}:{each.id}", {})
                for each in gone
            ),
            *beside,
        ]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        current, canary = _alias(cloud, name)
        found = [each for each in published(cloud, name) if hash_of(each)]
        return [
            DeployedVersion(
                int(each["Version"]),
                hash_of(each),
                datetime.fromisoformat(each["LastModified"][:19]).replace(
                    tzinfo=timezone.utc
                ),  # what follows are fractions and +0000
                _tags_in_description(each),
                each["Version"] == current,
                canary.get(each["Version"], 0.0),
            )
            for each in found
        ]

    def going_back(self, cloud: Cloud, name: str, version: DeployedVersion) -> list[Resource]:
        return [_pointing(name, str(version.number))]

    def promoting(self, cloud: Cloud, name: str) -> list[Resource]:
        _, canary = _alias(cloud, name)
        if not canary:
            raise CliError(f"{name} has no canary: one version has all requests")
        return [_pointing(name, next(iter(canary)))]

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        function = _function(cloud, name)
        if function is None:
            return None
        current, canary = _alias(cloud, name)
        versions = {each["Version"]: each for each in published(cloud, name)}
        running = versions.get(current, {})
        url = KINDS["AWS::Lambda::Url"].observe(cloud, alias_of(name))
        ready = KINDS["Tsx::Lambda::ProvisionedConcurrency"].observe(cloud, alias_of(name))
        return {
            "name": name,
            "target": "lambda",
            "region": cloud.region,
            "status": function.outputs["status"],
            "reason": "" if function.state == "changing" else function.reason,
            "model": _tags_in_description(running).get("tsx:model"),
            "version": current,
            "canary": [
                {"version": key, "percent": share, **_model(versions.get(key, {}))}
                for key, share in canary.items()
            ],
            "memory": running.get("MemorySize"),
            "timeout": running.get("Timeout"),
            "url": None if url is None else url.outputs["FunctionUrl"],
            "queues": [
                {"arn": each["EventSourceArn"], "state": each["State"]}
                for each in mappings(cloud, alias_of(name))
            ],
            "provisioned": (
                None if ready is None else ready.properties["ProvisionedConcurrentExecutions"]
            ),
            "alarms": alarm_states(cloud, alarms_of(cloud, name, "FunctionName")),
            "scales": scales(_scaling(cloud, name)),
        }

    def invoke(
        self, cloud: Cloud, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        """By the alias, as its URL would. Raises CloudError for an answer that is an error."""
        event = json.dumps(_event(body, content_type, accept)).encode()
        with translated_errors(f"asking {name}"):
            answer = cloud.client("lambda").invoke(
                FunctionName=name, Qualifier=ALIAS, Payload=event
            )
            head, prelude, streamed = answer["Payload"].read().partition(END_OF_HEAD)
        parsed = json.loads(head or b"null")
        if "FunctionError" in answer:
            raise CloudError(
                f"{name} failed:"
                f" {parsed.get('errorMessage', parsed) if isinstance(parsed, dict) else parsed}",
                answer["FunctionError"],
            )
        if not isinstance(parsed, dict) or "statusCode" not in parsed:
            return Response.complete(json.dumps(parsed).encode(), "application/json")
        text = parsed.get("body") or ""
        content = (
            streamed
            if prelude
            else base64.b64decode(text)
            if parsed.get("isBase64Encoded")
            else text.encode()
        )
        if int(parsed["statusCode"]) >= REFUSED:
            raise CloudError(
                f"{name} answered {parsed['statusCode']}: {content.decode(errors='replace')}",
                str(parsed["statusCode"]),
            )
        return Response.complete(content, parsed.get("headers", {}).get("content-type"))


def _function(cloud: Cloud, name: str) -> Observed | None:
    """None also where it belongs to another deployment."""
    found = KINDS["AWS::Lambda::Function"].observe(cloud, name)
    return found if found is not None and found.tags.get("tsx:name") == name else None


def _observed(cloud: Cloud, resource: Resource) -> Observed | None:
    return KINDS[resource.kind].observe(cloud, resource.name)


def _alias(cloud: Cloud, name: str) -> tuple[str, dict[str, float]]:
    """The version that has the requests, and the percentages of those that share them."""
    found = KINDS["AWS::Lambda::Alias"].observe(cloud, alias_of(name))
    if found is None:
        return "", {}
    weights: Mapping[str, float] = found.properties.get("RoutingConfig", {}).get(
        "AdditionalVersionWeights", {}
    )
    return found.properties["FunctionVersion"], {
        version: round(weight * 100, 2) for version, weight in weights.items()
    }


def _pointing(name: str, version: str) -> Resource:
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
    """What a version's description says, as tags: versions have none."""
    words = config.get("Description", "").split(maxsplit=3)
    if len(words) != 4 or words[0] != "tsx":
        return {}
    return {"tsx:model-sha": words[2], "tsx:model": words[3]}


def _beside(cloud: Cloud, name: str) -> list[Resource]:
    """What stands around the function."""
    place, needs = alias_of(name), ("Function",)
    found = []
    for id, kind in (
        ("Url", "AWS::Lambda::Url"),
        ("Provisioned", "Tsx::Lambda::ProvisionedConcurrency"),
    ):
        if KINDS[kind].observe(cloud, place) is not None:
            found.append(Resource(id, kind, place, {}, needs))
    kind = "AWS::Lambda::Permission"
    ours = [
        f"{place}|{each['Sid']}"
        for each in statements(cloud, place)
        if re.fullmatch("tsx-[0-9a-f]{8}", each["Sid"])
    ]
    found += numbered("Permission", kind, ours, needs, start=1)
    kind = "AWS::Lambda::EventSourceMapping"
    queues = [f"{place}|{each['EventSourceArn']}" for each in mappings(cloud, place)]
    for own in numbered("Queue", kind, queues, needs, start=1):
        seen = _observed(cloud, own)
        if seen is not None and seen.tags.get("tsx:name") == name:
            found.append(own)
    return [*found, *_scaling(cloud, name)]


def _scaling(cloud: Cloud, name: str) -> list[Resource]:
    if ScalableTarget().observe(cloud, scaled(name)) is None:
        return []
    return scaling_of(scaled(name), scaling_rule(name), ("Function", "Provisioned"))


def _alarms(cloud: Cloud, name: str) -> list[Resource]:
    names = alarms_of(cloud, name, "FunctionName")
    return numbered("Alarm", "AWS::CloudWatch::Alarm", names, start=1)


def _event(body: bytes, content_type: str, accept: str | None) -> dict[str, Any]:
    """A request as a function's URL hands it over: version 2.0 of the payload of API Gateway."""
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
