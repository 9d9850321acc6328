"""The resources of a SageMaker endpoint: bucket, model, configuration, endpoint, scaling, alarms.

Models and configurations cannot be changed, so their names contain a hash of their content. Earlier
ones stay under their own names, and a rollback gives the endpoint its earlier configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import AlarmMetrics, Alarms, create_alarms
from tsx_cli.deploy.aws.iam_policies import role
from tsx_cli.deploy.aws.kinds.autoscaling import predefined_metric, scaling_resources
from tsx_cli.deploy.aws.kinds.log_group import log_group
from tsx_cli.deploy.aws.session import own_bucket
from tsx_cli.deploy.engine.facts import Facts, owner_tags, tags_of
from tsx_cli.deploy.engine.resources import Ref, Resource, digest, ids_of
from tsx_cli.deploy.engine.shapes import fill, read_shapes, without_none
from tsx_cli.deploy.spec import Autoscaling, DeploySpec, SageMaker
from tsx_runtime.targets.image.environment import DERIVED_DEFAULTS
from tsx_runtime.targets.sagemaker.environment import STARTUP_S

LOG = "/aws/sagemaker/Endpoints/{}"
VARIANT = "AllTraffic"
SHAPES = Path(__file__).with_name("shapes.yaml")
INSTANCE_FIELDS = (
    "instance_type",
    "instances",
    "startup_timeout",
    "download_timeout",
    "ami",
    "routing",
)


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Return the resources of an endpoint.

    Raises:
        UsageError: SageMaker does not support the specification.
    """
    settings = spec.sagemaker
    _check(spec)
    tags = tags_of(spec, facts)
    resource_list, url = archive_in_bucket(
        spec, facts, tags, f"{upload_prefix(spec.name)}{facts.sha256[:16]}/model.tar.gz"
    )
    bucket = settings.bucket or own_bucket(facts.account, facts.region)
    resource_list += [role(spec, facts, tags, bucket)] if settings.role is None else []
    needs = ("ModelData", *(resource.id for resource in resource_list if resource.id == "Role"))
    properties = model_properties(spec, facts, url)
    model = Resource(
        "Model",
        "AWS::SageMaker::Model",
        name_prefix(spec.name) + digest(properties),
        properties,
        needs,
        tags,
    )
    properties = config_properties(spec, model.name)
    config = Resource(
        "EndpointConfig",
        "AWS::SageMaker::EndpointConfig",
        name_prefix(spec.name) + digest(properties),
        properties,
        ("Model",),
        tags,
    )
    alarms = canary_alarms(spec, tags, {"EndpointName": spec.name, "VariantName": VARIANT})
    endpoint: dict[str, Any] = {"EndpointConfigName": config.name}
    if settings.serverless is None:
        endpoint["DeploymentConfig"] = _deployment(spec, alarms.names)
    if settings.autoscaling is not None:
        # A new version keeps the number of instances that autoscaling has reached.
        excluded = [
            {"VariantPropertyType": "DesiredWeight"},
            {"VariantPropertyType": "DataCaptureConfig"},
        ]
        endpoint |= {
            "RetainAllVariantProperties": True,
            "ExcludeRetainedVariantProperties": excluded,
        }
    log = log_group(spec, tags, LOG.format(spec.name))
    needs = ("EndpointConfig", *ids_of((*alarms.resources, *log)))
    resource_list += [
        model,
        config,
        *alarms.resources,
        *log,
        Resource("Endpoint", "AWS::SageMaker::Endpoint", spec.name, endpoint, needs, tags),
    ]
    if settings.autoscaling is not None:
        resource_list += _scaling_resources(spec, settings.autoscaling)
    return resource_list


def archive_in_bucket(
    spec: DeploySpec, facts: Facts, tags: Mapping[str, str], key: str
) -> tuple[list[Resource], str]:
    """Return the resources of the archive in S3, and the archive's address.

    The bucket is one of the resources if tsx creates it.
    """
    given_bucket = spec.sagemaker.bucket
    bucket = given_bucket or own_bucket(facts.account, facts.region)
    resource_list = [] if given_bucket else [_bucket(bucket, tags)]
    content = {"Sha256": facts.sha256, "Path": str(facts.archive)}
    data = Resource(
        "ModelData",
        "Tsx::S3::Object",
        f"{bucket}/{key}",
        content,
        ids_of(resource_list),
    )
    return [*resource_list, data], f"s3://{data.name}"


def upload_prefix(name: str) -> str:
    """Return the prefix of the keys of a deployment's uploads."""
    return f"tsx/{name}/"


def scaling_rule(name: str) -> str:
    return f"tsx-{name}-in-flight"


def name_prefix(name: str) -> str:
    """Return the prefix of the names of a deployment's models, configurations and alarms."""
    return f"tsx-{name}-"


def _check(spec: DeploySpec) -> None:
    settings = spec.sagemaker
    if (
        settings.autoscaling is not None
        and settings.autoscaling.min == 0
        and settings.asynchronous is None
    ):
        raise UsageError(
            "sagemaker.autoscaling.min is 0, which SageMaker allows for asynchronous endpoints"
            " only, and for the copies of a component (sagemaker.component): use 1 or more"
        )
    if settings.serverless is None:
        return
    clashes = {
        "canary": spec.canary,
        "sagemaker.subnets": settings.subnets,
        "sagemaker.network_isolation": settings.network_isolation,
        "sagemaker.data_capture": settings.data_capture,
        "sagemaker.asynchronous": settings.asynchronous,
    }
    fields = [key for key, value in clashes.items() if value]
    if fields:
        raise UsageError(
            f"a serverless endpoint has no {', '.join(fields)}: SageMaker offers it on instances"
            " only. Remove one of them"
        )
    if settings.autoscaling is not None and settings.serverless.provisioned is None:
        raise UsageError(
            "a serverless endpoint scales by itself; sagemaker.autoscaling is for its provisioned"
            " concurrency, which is not given"
        )


def _bucket(name: str, tags: Mapping[str, str]) -> Resource:
    public_access_block = dict.fromkeys(
        ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
    )
    # The bucket has no owner tag, because every endpoint of this account and region uses it.
    shared = {"tsx:target": tags["tsx:target"]}
    return Resource(
        "Bucket",
        "AWS::S3::Bucket",
        name,
        {"PublicAccessBlockConfiguration": public_access_block},
        tags=shared,
    )


def model_properties(spec: DeploySpec, facts: Facts, url: str) -> dict[str, Any]:
    settings = spec.sagemaker
    # The mode determines the time limit of a request and the container's number of workers.
    mode = (
        "serverless" if settings.serverless else "asynchronous" if settings.asynchronous else None
    )
    variables = without_none({"TSX_TARGET": "sagemaker", "TSX_SAGEMAKER_MODE": mode})
    if settings.serverless is None and settings.startup_timeout > STARTUP_S:
        variables[DERIVED_DEFAULTS] = f"default_startup_timeout={settings.startup_timeout}"
    container = {"Image": facts.image, "ModelDataUrl": url, "Mode": "SingleModel"}
    properties = {
        "PrimaryContainer": {**container, "Environment": variables | spec.env},
        "ExecutionRoleArn": settings.role or Ref("Role", "Arn"),
        "VpcConfig": vpc_config(settings),
        "EnableNetworkIsolation": settings.network_isolation or None,
    }
    return without_none(properties)


def vpc_config(settings: SageMaker) -> dict[str, Any] | None:
    groups = {"Subnets": list(settings.subnets), "SecurityGroupIds": list(settings.security_groups)}
    return groups if settings.subnets else None


def config_properties(spec: DeploySpec, model: str) -> dict[str, Any]:
    settings, kinds = spec.sagemaker, read_shapes(SHAPES)
    asynchronous, capture, serverless = (
        settings.asynchronous,
        settings.data_capture,
        settings.serverless,
    )
    values: dict[str, Any] = (
        dict.fromkeys(INSTANCE_FIELDS) if serverless else server_values(settings)
    )
    values |= {"model": model, "kms_key": settings.kms_key} | dict.fromkeys(
        ("serverless", "capture", "asynchronous")
    )
    if serverless is not None:
        values["serverless"] = without_none(
            {
                "MemorySizeInMB": serverless.memory,
                "MaxConcurrency": serverless.concurrency,
                "ProvisionedConcurrency": serverless.provisioned,
            }
        )
    if capture is not None:
        capture_values = {"percent": round(capture.percent), "to": capture.to}
        values["capture"] = fill(kinds["capture"], capture_values)
    if asynchronous is not None:
        topics = {
            "SuccessTopic": asynchronous.success_topic,
            "ErrorTopic": asynchronous.error_topic,
        }
        client_config = {"MaxConcurrentInvocationsPerInstance": asynchronous.concurrency}
        values["asynchronous"] = fill(
            kinds["asynchronous"],
            {
                **asynchronous.model_dump(),
                "topics": without_none(topics) or None,
                "client": without_none(client_config) or None,
            },
        )
    config: dict[str, Any] = fill(kinds["config"], values)
    return config


def server_values(settings: SageMaker) -> dict[str, Any]:
    """Return the values that describe instances in a shape."""
    return settings.model_dump(include=set(INSTANCE_FIELDS)) | {
        "routing": {"RoutingStrategy": settings.routing}
    }


def canary_alarms(
    spec: DeploySpec, tags: Mapping[str, str], dimensions: Mapping[str, str]
) -> Alarms:
    if spec.canary is None:
        return Alarms([], [])
    # SageMaker reports the latency in microseconds.
    metrics = AlarmMetrics("AWS/SageMaker", "Invocation5XXErrors", "ModelLatency", 1000, dimensions)
    return create_alarms(spec.canary.alarms, metrics, f"tsx-{spec.name}", owner_tags(tags))


def rollback_config(names: Sequence[str]) -> dict[str, Any]:
    """Return the part of a DeploymentConfig with the alarms that restore the earlier version."""
    alarms = [{"AlarmName": name} for name in names]
    return {"AutoRollbackConfiguration": {"Alarms": alarms}} if alarms else {}


def _deployment(spec: DeploySpec, alarm_names: list[str]) -> dict[str, Any]:
    routing: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0}
    if spec.canary is not None:
        size = {"Type": "CAPACITY_PERCENT", "Value": round(spec.canary.percent)}
        routing = {"Type": "CANARY", "WaitIntervalInSeconds": spec.canary.bake, "CanarySize": size}
    policy = {
        "TrafficRoutingConfiguration": routing,
        "TerminationWaitInSeconds": 0 if spec.canary is None else 60,
    }
    return {"BlueGreenUpdatePolicy": policy, **rollback_config(alarm_names)}


def _scaling_resources(spec: DeploySpec, autoscaling: Autoscaling) -> list[Resource]:
    kind, dimension = "ConcurrentRequestsPerModelHighResolution", "DesiredInstanceCount"
    if spec.sagemaker.serverless is not None:
        kind, dimension = "ProvisionedConcurrencyUtilization", "DesiredProvisionedConcurrency"
    metric = predefined_metric(f"SageMakerVariant{kind}")
    if spec.sagemaker.asynchronous is not None:
        # While there are no instances, only the number of waiting requests can start one.
        backlog = fill(read_shapes(SHAPES)["backlog"], {"name": spec.name})
        metric = {"CustomizedMetricSpecification": backlog}
    target = f"sagemaker|endpoint/{spec.name}/variant/{VARIANT}|sagemaker:variant:{dimension}"
    return scaling_resources(target, scaling_rule(spec.name), autoscaling, metric, "Endpoint")
