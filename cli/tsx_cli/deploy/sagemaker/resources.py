"""A SageMaker endpoint as resources: bucket and model data, model, configuration, endpoint,
scaling, alarms.

Models and configurations cannot be changed, so their names are made of what they say: what was
deployed before stays there under its own name, and going back is giving the endpoint its earlier
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import AlarmMetrics, Alarms, alarms
from tsx_cli.deploy.aws.iam_policies import role
from tsx_cli.deploy.aws.kinds.autoscaling import scaling
from tsx_cli.deploy.aws.kinds.log_group import log_group
from tsx_cli.deploy.aws.session import own_bucket
from tsx_cli.deploy.engine.facts import Facts, lasting, tags_of
from tsx_cli.deploy.engine.resources import Ref, Resource, digest
from tsx_cli.deploy.spec import Autoscaling, DeploySpec
from tsx_runtime.targets.image.environment import GIVEN_DEFAULTS
from tsx_runtime.targets.sagemaker.environment import STARTUP

VARIANT = "AllTraffic"


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
    container: dict[str, Any] = {"Image": facts.image, "ModelDataUrl": url, "Mode": "SingleModel"}
    # What the platform does not tell a container: how long a request may take, and how many workers
    # there is room for.
    kind = (
        "serverless"
        if own.serverless is not None
        else "asynchronous"
        if own.asynchronous is not None
        else None
    )
    own_variables = {"TSX_TARGET": "sagemaker", **({"TSX_SAGEMAKER_MODE": kind} if kind else {})}
    if own.serverless is None and own.startup_timeout > STARTUP:
        own_variables[GIVEN_DEFAULTS] = f"default_startup_timeout={own.startup_timeout}"
    container["Environment"] = own_variables | spec.env
    properties: dict[str, Any] = {
        "PrimaryContainer": container,
        "ExecutionRoleArn": own.role or Ref("Role", "Arn"),
    }
    if own.subnets:
        properties["VpcConfig"] = {
            "Subnets": list(own.subnets),
            "SecurityGroupIds": list(own.security_groups),
        }
    if own.network_isolation:
        properties["EnableNetworkIsolation"] = True
    return properties


def config_properties(spec: DeploySpec, model: str) -> dict[str, Any]:
    own = spec.sagemaker
    variant: dict[str, Any] = {
        "VariantName": VARIANT,
        "ModelName": model,
        "InitialVariantWeight": 1.0,
    }
    if own.serverless is not None:
        variant["ServerlessConfig"] = {
            "MemorySizeInMB": own.serverless.memory,
            "MaxConcurrency": own.serverless.concurrency,
        }
        if own.serverless.provisioned is not None:
            variant["ServerlessConfig"]["ProvisionedConcurrency"] = own.serverless.provisioned
    else:
        variant |= {
            "InstanceType": own.instance_type,
            "InitialInstanceCount": own.instances,
            "ContainerStartupHealthCheckTimeoutInSeconds": own.startup_timeout,
            "ModelDataDownloadTimeoutInSeconds": own.download_timeout,
            "RoutingConfig": {"RoutingStrategy": own.routing},
        }
        if own.ami is not None:
            variant["InferenceAmiVersion"] = own.ami
    properties: dict[str, Any] = {"ProductionVariants": [variant]}
    if own.kms_key is not None:
        properties["KmsKeyId"] = own.kms_key
    if own.data_capture is not None:
        properties["DataCaptureConfig"] = {
            "EnableCapture": True,
            "InitialSamplingPercentage": round(own.data_capture.percent),
            "DestinationS3Uri": own.data_capture.to,
            "CaptureOptions": [{"CaptureMode": "Input"}, {"CaptureMode": "Output"}],
        }
    if own.asynchronous is not None:
        properties["AsyncInferenceConfig"] = _asynchronous(
            own.asynchronous.model_dump(exclude_none=True)
        )
    return properties


def _asynchronous(fields: Mapping[str, Any]) -> dict[str, Any]:
    output: dict[str, Any] = {"S3OutputPath": fields["output"]}
    if "failures" in fields:
        output["S3FailurePath"] = fields["failures"]
    topics = {"SuccessTopic": fields.get("success_topic"), "ErrorTopic": fields.get("error_topic")}
    if any(topics.values()):
        output["NotificationConfig"] = {key: value for key, value in topics.items() if value}
    config: dict[str, Any] = {"OutputConfig": output}
    if "concurrency" in fields:
        config["ClientConfig"] = {"MaxConcurrentInvocationsPerInstance": fields["concurrency"]}
    return config


def _alarms(spec: DeploySpec, tags: Mapping[str, str]) -> Alarms:
    if spec.canary is None:
        return Alarms([], [])
    where = {"EndpointName": spec.name, "VariantName": VARIANT}
    metrics = AlarmMetrics(
        "AWS/SageMaker", "Invocation5XXErrors", "ModelLatency", 1000, where
    )  # it counts microseconds
    return alarms(spec.canary.alarms, metrics, f"tsx-{spec.name}", lasting(tags))


def _deployment(spec: DeploySpec, alarm_names: list[str]) -> dict[str, Any]:
    if spec.canary is None:
        routing: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": 0}
    else:
        size = {"Type": "CAPACITY_PERCENT", "Value": round(spec.canary.percent)}
        routing = {"Type": "CANARY", "WaitIntervalInSeconds": spec.canary.bake, "CanarySize": size}
    policy = {
        "TrafficRoutingConfiguration": routing,
        "TerminationWaitInSeconds": 0 if spec.canary is None else 60,
    }
    deployment: dict[str, Any] = {"BlueGreenUpdatePolicy": policy}
    if alarm_names:
        deployment["AutoRollbackConfiguration"] = {
            "Alarms": [{"AlarmName": name} for name in alarm_names]
        }
    return deployment


def _backlog(name: str) -> dict[str, Any]:
    """https://docs.aws.amazon.com/sagemaker/latest/dg/async-inference-autoscale.html"""
    where = [{"Name": "EndpointName", "Value": name}]
    return {
        "MetricName": "ApproximateBacklogSizePerInstance",
        "Namespace": "AWS/SageMaker",
        "Dimensions": where,
        "Statistic": "Average",
    }


def _scaling(spec: DeploySpec, wanted: Autoscaling) -> list[Resource]:
    serverless = spec.sagemaker.serverless is not None
    dimension = "sagemaker:variant:" + (
        "DesiredProvisionedConcurrency" if serverless else "DesiredInstanceCount"
    )
    metric = (
        "SageMakerVariantProvisionedConcurrencyUtilization"
        if serverless
        else "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    )
    measured: dict[str, Any] = {"PredefinedMetricSpecification": {"PredefinedMetricType": metric}}
    if (
        spec.sagemaker.asynchronous is not None
    ):  # only the requests that wait in a queue can wake a fleet of none
        measured = {"CustomizedMetricSpecification": _backlog(spec.name)}
    place = f"sagemaker|endpoint/{spec.name}/variant/{VARIANT}|{dimension}"
    return scaling(place, scaling_rule(spec.name), wanted, measured, "Endpoint")
