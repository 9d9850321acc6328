"""A SageMaker endpoint as resources: bucket and model data, model, configuration, endpoint,
scaling, alarms.

Models and configurations cannot be changed, so their names are made of what they say: what was
deployed before stays there under its own name, and going back is giving the endpoint its earlier
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import AlarmMetrics, Alarms, alarms
from tsx_cli.deploy.aws.iam_policies import role
from tsx_cli.deploy.aws.kinds.autoscaling import predefined, scaling
from tsx_cli.deploy.aws.kinds.log_group import log_group
from tsx_cli.deploy.aws.session import own_bucket
from tsx_cli.deploy.engine.facts import Facts, lasting, tags_of
from tsx_cli.deploy.engine.resources import Ref, Resource, digest
from tsx_cli.deploy.engine.shapes import filled, shapes, some
from tsx_cli.deploy.spec import Autoscaling, DeploySpec, SageMaker
from tsx_runtime.targets.image.environment import DERIVED_DEFAULTS
from tsx_runtime.targets.sagemaker.environment import STARTUP_S

VARIANT = "AllTraffic"
SHAPES = Path(__file__).with_name("shapes.yaml")
SERVER = ("instance_type", "instances", "startup_timeout", "download_timeout", "ami", "routing")


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Everything of one endpoint. Raises UsageError for what SageMaker does not do."""
    own = spec.sagemaker
    _check(spec)
    tags = tags_of(spec, facts)
    made, url = uploaded(spec, facts, tags, f"{uploads(spec.name)}{facts.sha256[:16]}/model.tar.gz")
    bucket = own.bucket or own_bucket(facts.account, facts.region)
    made += [role(spec, facts.account, facts.region, tags, bucket)] if own.role is None else []
    needs = ("ModelData", *(each.id for each in made if each.id == "Role"))
    properties = model_properties(spec, facts, url)
    model = Resource(
        "Model",
        "AWS::SageMaker::Model",
        prefix(spec.name) + digest(properties),
        properties,
        needs,
        tags,
    )
    properties = config_properties(spec, model.name)
    config = Resource(
        "EndpointConfig",
        "AWS::SageMaker::EndpointConfig",
        prefix(spec.name) + digest(properties),
        properties,
        ("Model",),
        tags,
    )
    watched = _alarms(spec, tags)
    endpoint: dict[str, Any] = {"EndpointConfigName": config.name}
    if own.serverless is None:
        endpoint["DeploymentConfig"] = _deployment(spec, watched.names)
    if own.autoscaling is not None:
        # A new version starts with as many instances as scaling has come to, not with those of its
        # first day.
        ours = [
            {"VariantPropertyType": "DesiredWeight"},
            {"VariantPropertyType": "DataCaptureConfig"},
        ]
        endpoint |= {"RetainAllVariantProperties": True, "ExcludeRetainedVariantProperties": ours}
    log = log_group(spec, tags)
    needs = ("EndpointConfig", *(each.id for each in (*watched.made, *log)))
    made += [
        model,
        config,
        *watched.made,
        *log,
        Resource("Endpoint", "AWS::SageMaker::Endpoint", spec.name, endpoint, needs, tags),
    ]
    if own.autoscaling is not None:
        made += _scaling(spec, own.autoscaling)
    return made


def uploaded(
    spec: DeploySpec, facts: Facts, tags: Mapping[str, str], key: str
) -> tuple[list[Resource], str]:
    """The archive under that key, with its bucket if that is tsx's own; and its address."""
    named = spec.sagemaker.bucket
    bucket = named or own_bucket(facts.account, facts.region)
    made = [] if named else [_bucket(bucket, tags)]
    content = {"Sha256": facts.sha256, "Path": str(facts.archive)}
    data = Resource(
        "ModelData", "Tsx::S3::Object", f"{bucket}/{key}", content, tuple(each.id for each in made)
    )
    return [*made, data], f"s3://{data.name}"


def uploads(name: str) -> str:
    """The beginning of the keys of what was uploaded for a deployment."""
    return f"tsx/{name}/"


def scaling_rule(name: str) -> str:
    return f"tsx-{name}-in-flight"


def prefix(name: str) -> str:
    """Of the names of a deployment's models, configurations and alarms."""
    return f"tsx-{name}-"


def _check(spec: DeploySpec) -> None:
    own = spec.sagemaker
    if own.autoscaling is not None and own.autoscaling.min == 0 and own.asynchronous is None:
        raise UsageError(
            "sagemaker.autoscaling.min is 0, which SageMaker allows for asynchronous endpoints"
            " only, and for the copies of a component (sagemaker.component): use 1 or more"
        )
    if own.serverless is None:
        return
    clashes = {
        "canary": spec.canary,
        "sagemaker.subnets": own.subnets,
        "sagemaker.network_isolation": own.network_isolation,
        "sagemaker.data_capture": own.data_capture,
        "sagemaker.asynchronous": own.asynchronous,
    }
    fields = [key for key, value in clashes.items() if value]
    if fields:
        raise UsageError(
            f"a serverless endpoint has no {', '.join(fields)}: SageMaker offers it on instances"
            " only. Remove one of them"
        )
    if own.autoscaling is not None and own.serverless.provisioned is None:
        raise UsageError(
            "a serverless endpoint scales by itself; sagemaker.autoscaling is for its provisioned"
            " concurrency, which is not given"
        )


def _bucket(name: str, tags: Mapping[str, str]) -> Resource:
    closed = dict.fromkeys(
        ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
    )
    shared = {
        "tsx:target": tags["tsx:target"]
    }  # it serves every endpoint of this account and region
    return Resource(
        "Bucket", "AWS::S3::Bucket", name, {"PublicAccessBlockConfiguration": closed}, tags=shared
    )


def model_properties(spec: DeploySpec, facts: Facts, url: str) -> dict[str, Any]:
    own = spec.sagemaker
    # What the platform does not tell a container: how long a request may take, and how many workers
    # there is room for.
    mode = "serverless" if own.serverless else "asynchronous" if own.asynchronous else None
    variables = some({"TSX_TARGET": "sagemaker", "TSX_SAGEMAKER_MODE": mode})
    if own.serverless is None and own.startup_timeout > STARTUP_S:
        variables[DERIVED_DEFAULTS] = f"default_startup_timeout={own.startup_timeout}"
    container = {"Image": facts.image, "ModelDataUrl": url, "Mode": "SingleModel"}
    properties = {
        "PrimaryContainer": {**container, "Environment": variables | spec.env},
        "ExecutionRoleArn": own.role or Ref("Role", "Arn"),
        "VpcConfig": network(own),
        "EnableNetworkIsolation": own.network_isolation or None,
    }
    return some(properties)


def network(own: SageMaker) -> dict[str, Any] | None:
    groups = {"Subnets": list(own.subnets), "SecurityGroupIds": list(own.security_groups)}
    return groups if own.subnets else None


def config_properties(spec: DeploySpec, model: str) -> dict[str, Any]:
    own, kinds = spec.sagemaker, shapes(SHAPES)
    queued, capture, serverless = own.asynchronous, own.data_capture, own.serverless
    values: dict[str, Any] = dict.fromkeys(SERVER) if serverless else server_values(own)
    values |= {"model": model, "kms_key": own.kms_key} | dict.fromkeys(
        ("serverless", "capture", "asynchronous")
    )
    if serverless is not None:
        values["serverless"] = some(
            {
                "MemorySizeInMB": serverless.memory,
                "MaxConcurrency": serverless.concurrency,
                "ProvisionedConcurrency": serverless.provisioned,
            }
        )
    if capture is not None:
        whole = {"percent": round(capture.percent), "to": capture.to}
        values["capture"] = filled(kinds["capture"], whole)
    if queued is not None:
        topics = {"SuccessTopic": queued.success_topic, "ErrorTopic": queued.error_topic}
        most = {"MaxConcurrentInvocationsPerInstance": queued.concurrency}
        values["asynchronous"] = filled(
            kinds["asynchronous"],
            {**queued.model_dump(), "topics": some(topics) or None, "client": some(most) or None},
        )
    found: dict[str, Any] = filled(kinds["config"], values)
    return found


def server_values(own: SageMaker) -> dict[str, Any]:
    """Of an endpoint's instances."""
    return own.model_dump(include=set(SERVER)) | {"routing": {"RoutingStrategy": own.routing}}


def _alarms(spec: DeploySpec, tags: Mapping[str, str]) -> Alarms:
    return canary_alarms(spec, tags, {"EndpointName": spec.name, "VariantName": VARIANT})


def canary_alarms(spec: DeploySpec, tags: Mapping[str, str], where: Mapping[str, str]) -> Alarms:
    if spec.canary is None:
        return Alarms([], [])
    # SageMaker counts microseconds.
    metrics = AlarmMetrics("AWS/SageMaker", "Invocation5XXErrors", "ModelLatency", 1000, where)
    return alarms(spec.canary.alarms, metrics, f"tsx-{spec.name}", lasting(tags))


def rolled_back(names: Sequence[str]) -> dict[str, Any]:
    """What of a DeploymentConfig says which alarms restore the former version."""
    found = [{"AlarmName": name} for name in names]
    return {"AutoRollbackConfiguration": {"Alarms": found}} if found else {}


def _deployment(spec: DeploySpec, alarm_names: list[str]) -> dict[str, Any]:
    routing: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0}
    if spec.canary is not None:
        size = {"Type": "CAPACITY_PERCENT", "Value": round(spec.canary.percent)}
        routing = {"Type": "CANARY", "WaitIntervalInSeconds": spec.canary.bake, "CanarySize": size}
    policy = {
        "TrafficRoutingConfiguration": routing,
        "TerminationWaitInSeconds": 0 if spec.canary is None else 60,
    }
    return {"BlueGreenUpdatePolicy": policy, **rolled_back(alarm_names)}


def _scaling(spec: DeploySpec, wanted: Autoscaling) -> list[Resource]:
    kind, dimension = "ConcurrentRequestsPerModelHighResolution", "DesiredInstanceCount"
    if spec.sagemaker.serverless is not None:
        kind, dimension = "ProvisionedConcurrencyUtilization", "DesiredProvisionedConcurrency"
    measured = predefined(f"SageMakerVariant{kind}")
    if spec.sagemaker.asynchronous is not None:
        # Only the requests that wait in a queue can wake a fleet of none.
        backlog = filled(shapes(SHAPES)["backlog"], {"name": spec.name})
        measured = {"CustomizedMetricSpecification": backlog}
    place = f"sagemaker|endpoint/{spec.name}/variant/{VARIANT}|sagemaker:variant:{dimension}"
    return scaling(place, scaling_rule(spec.name), wanted, measured, "Endpoint")
