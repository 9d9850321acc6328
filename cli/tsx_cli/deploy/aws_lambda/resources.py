"""The resources of a Lambda function: function, version, alias, and the sources of requests.

A version cannot be changed, and its number is not known in advance. Therefore the description of a
function begins with a hash of its content, by which later runs find the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import AlarmMetrics, Alarms, create_alarms
from tsx_cli.deploy.aws.iam_policies import role
from tsx_cli.deploy.aws.kinds.autoscaling import predefined_metric, scaling_resources
from tsx_cli.deploy.aws.kinds.log_group import log_group
from tsx_cli.deploy.engine.facts import Facts, owner_tags, tags_of
from tsx_cli.deploy.engine.resources import Ref, Resource, digest, ids_of
from tsx_cli.deploy.engine.shapes import without_none
from tsx_cli.deploy.spec import DeploySpec, Lambda, ManagedInstances

LOG = "/aws/lambda/{}"
ALIAS = "live"
MANAGED = "lambda.managed_instances"
MAX_MIB = 10_240  # memory and /tmp of a function without managed instances


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Return the resources of a function.

    Raises:
        UsageError: Lambda does not support the specification.
    """
    settings = spec.lambda_
    _check(spec, settings)
    tags = tags_of(spec, facts)
    resource_list = (
        []
        if settings.managed_instances is None or settings.managed_instances.provider
        else [_provider(spec, settings.managed_instances, tags)]
    )
    resource_list += [role(spec, facts, tags)] if settings.role is None else []
    resource_list += log_group(spec, tags, LOG.format(spec.name))
    function, content_hash = _function(spec, facts)
    resource_list.append(
        Resource(
            "Function", "AWS::Lambda::Function", spec.name, function, ids_of(resource_list), tags
        )
    )
    version = Resource(
        "Version",
        "AWS::Lambda::Version",
        f"{spec.name}:{content_hash}",
        {"FunctionName": spec.name},
        ("Function",),
    )
    alarms = _alarms(spec, tags, content_hash)
    needs = ("Version", *ids_of(alarms.resources))
    alias = {"FunctionName": spec.name, "Name": ALIAS, "FunctionVersion": Ref("Version", "Version")}
    resource_list += [version, *alarms.resources]
    canary = spec.canary
    shift = {} if canary is None else {**canary.model_dump(), "alarms": alarms.names}
    resource_list.append(
        Resource(
            "Alias", "AWS::Lambda::Alias", alias_of(spec.name), alias, needs, change_settings=shift
        )
    )
    if settings.provisioned is not None or settings.autoscaling is not None:
        resource_list += _provisioned_concurrency(spec, settings)
    if settings.url != "off":
        resource_list += _url(spec, settings)
    if settings.queue is not None:
        resource_list.append(_queue(spec, settings, tags))
    return resource_list


def alias_of(name: str) -> str:
    return f"{name}:{ALIAS}"


def scaling_rule(name: str) -> str:
    return f"tsx-{name}-in-use"


def scaling_target(name: str) -> str:
    """Return the name of the alias's provisioned concurrency in Application Auto Scaling."""
    return f"lambda|function:{alias_of(name)}|lambda:function:ProvisionedConcurrency"


def _check(spec: DeploySpec, settings: Lambda) -> None:
    if settings.managed_instances is None:
        excessive_keys = [
            f"lambda.{key}"
            for key, value in (("memory", settings.memory), ("storage", settings.storage))
            if value > MAX_MIB
        ]
        if excessive_keys:
            raise UsageError(
                f"{excessive_keys[0]}: Lambda gives at most {MAX_MIB} MiB; use {MANAGED} for more"
            )
        return
    clashes = {
        "lambda.provisioned": settings.provisioned,
        "lambda.autoscaling": settings.autoscaling,
        "lambda.reserved": settings.reserved,
    }
    fields = [key for key, value in clashes.items() if value is not None]
    if fields:
        raise UsageError(
            f"a function on managed instances has no {', '.join(fields)}: its instances always run."
            " Remove one of them"
        )
    instance_settings = settings.managed_instances
    if instance_settings.gpu_memory is not None and settings.architecture != "x86_64":
        raise UsageError(
            f"{MANAGED}.gpu_memory: Lambda has GPUs for x86_64 only, not for"
            f" {settings.architecture}"
        )
    if instance_settings.provider is None and not (
        instance_settings.subnets and instance_settings.operator_role
    ):
        raise UsageError(
            f"{MANAGED} needs subnets and operator_role for the instances, or provider, the ARN of"
            " a capacity provider"
        )


def _provider(
    spec: DeploySpec, instance_settings: ManagedInstances, tags: Mapping[str, str]
) -> Resource:
    types, max_cpus = list(instance_settings.instance_types) or None, instance_settings.most_cpus
    properties = {
        "PermissionsConfig": {"CapacityProviderOperatorRoleArn": instance_settings.operator_role},
        "VpcConfig": {
            "SubnetIds": list(instance_settings.subnets),
            "SecurityGroupIds": list(instance_settings.security_groups),
        },
        "InstanceRequirements": without_none(
            {"Architectures": [spec.lambda_.architecture], "AllowedInstanceTypes": types}
        ),
        "CapacityProviderScalingConfig": max_cpus and {"MaxVCpuCount": max_cpus},
    }
    kind = "AWS::Lambda::CapacityProvider"
    return Resource(
        "CapacityProvider",
        kind,
        f"tsx-{spec.name}",
        without_none(properties),
        tags=owner_tags(tags),
    )


def _function(spec: DeploySpec, facts: Facts) -> tuple[dict[str, Any], str]:
    """Return the properties of a function, and the hash that identifies its version."""
    settings, queue = spec.lambda_, spec.lambda_.queue
    variables = {}  # see docs/guides/deploy/lambda.md
    if settings.streaming:
        variables["TSX_LAMBDA_ANSWERS"] = "streamed"
    if queue is not None and queue.results is not None:
        variables["TSX_LAMBDA_RESULTS"] = queue.results
        variables["TSX_LAMBDA_RESULTS_OWNER"] = queue.results_owner or facts.account
    variables |= spec.env
    network = {
        "SubnetIds": sorted(settings.subnets),
        "SecurityGroupIds": sorted(settings.security_groups),
    }
    properties = without_none(
        {
            "PackageType": "Image",
            "Code": {"ImageUri": facts.image},
            "Role": settings.role or Ref("Role", "Arn"),
            "MemorySize": settings.memory,
            "Timeout": settings.timeout,
            "EphemeralStorage": {"Size": settings.storage},
            "Architectures": [settings.architecture],
            "Environment": {"Variables": variables} if variables else None,
            "VpcConfig": network if settings.subnets else None,
            **_managed_instances(settings.managed_instances),
        }
    )
    content_hash = digest([properties, facts.sha256])
    properties["Description"] = (
        f"tsx {content_hash} {facts.sha256[:16]} {facts.model_name}/{facts.model_version}"[:256]
    )
    if settings.reserved is not None:
        properties["ReservedConcurrentExecutions"] = settings.reserved
    return properties, content_hash


def _managed_instances(instance_settings: ManagedInstances | None) -> dict[str, Any]:
    if instance_settings is None:
        return {}
    memory, gpu = instance_settings.memory_per_cpu, instance_settings.gpu_memory
    config = {
        "CapacityProviderArn": instance_settings.provider or Ref("CapacityProvider", "Arn"),
        "PerExecutionEnvironmentMaxConcurrency": instance_settings.concurrency,
        "ExecutionEnvironmentMemoryGiBPerVCpu": memory and float(memory),
    }
    return {
        "CapacityProviderConfig": {
            "LambdaManagedInstancesCapacityProviderConfig": without_none(config)
        },
        "AcceleratorConfig": gpu and {"AcceleratorMemorySize": gpu},
    }


def _alarms(spec: DeploySpec, tags: Mapping[str, str], content_hash: str) -> Alarms:
    """Return the alarms that watch only the requests of a new version.

    The name of each alarm depends on the version's hash. An alarm that two versions shared would
    keep the state of the earlier version.
    """
    if spec.canary is None:
        return Alarms([], [])
    alias_dimensions = {"FunctionName": spec.name, "Resource": alias_of(spec.name)}
    version: dict[str, str | Ref] = {
        **alias_dimensions,
        "ExecutedVersion": Ref("Version", "Version", content_hash),
    }
    # `Errors` does not count error responses of a model, because their invocation succeeds.
    error_responses = None if spec.lambda_.url == "off" else ("Url5xxCount", alias_dimensions)
    metrics = AlarmMetrics("AWS/Lambda", "Errors", "Duration", 1, version, error_responses)
    return create_alarms(
        spec.canary.alarms, metrics, f"tsx-{spec.name}", owner_tags(tags), ("Version",)
    )


def _provisioned_concurrency(spec: DeploySpec, settings: Lambda) -> list[Resource]:
    """Return the provisioned concurrency; with a scaling rule, only its initial number is set."""
    number = settings.provisioned if settings.autoscaling is None else settings.autoscaling.min
    alias_arguments = {"FunctionName": spec.name, "Qualifier": ALIAS}
    fields = {"ProvisionedConcurrentExecutions": number}
    properties, change_settings = (
        (alias_arguments | fields, {})
        if settings.autoscaling is None
        else (alias_arguments, fields)
    )
    resource_list = [
        Resource(
            "Provisioned",
            "Tsx::Lambda::ProvisionedConcurrency",
            alias_of(spec.name),
            properties,
            ("Alias",),
            change_settings=change_settings,
        )
    ]
    if settings.autoscaling is None:
        return resource_list
    metric = predefined_metric("LambdaProvisionedConcurrencyUtilization")
    return resource_list + scaling_resources(
        scaling_target(spec.name),
        scaling_rule(spec.name),
        settings.autoscaling,
        metric,
        "Provisioned",
    )


def _url(spec: DeploySpec, settings: Lambda) -> list[Resource]:
    """Return a URL with its permissions.

    Callers of a public URL need both permissions. For callers in the same account, their own policy
    is enough.
    """
    is_public = settings.url == "public"
    mode = "RESPONSE_STREAM" if settings.streaming else "BUFFERED"
    properties = {
        "TargetFunctionArn": spec.name,
        "Qualifier": ALIAS,
        "AuthType": "NONE" if is_public else "AWS_IAM",
        "InvokeMode": mode,
    }
    resource_list = [
        Resource("Url", "AWS::Lambda::Url", alias_of(spec.name), properties, ("Alias",))
    ]
    permissions: list[dict[str, Any]] = [
        {"Action": "lambda:InvokeFunctionUrl", "FunctionUrlAuthType": "NONE"},
        {"Action": "lambda:InvokeFunction", "InvokedViaFunctionUrl": True},
    ]
    for number, permission in enumerate(permissions if is_public else (), start=1):
        fields = {"FunctionName": alias_of(spec.name), "Principal": "*", **permission}
        name = f"{alias_of(spec.name)}|tsx-{digest(fields)}"
        kind, id = "AWS::Lambda::Permission", f"UrlPermission{number}"
        resource_list.append(Resource(id, kind, name, fields, ("Alias",)))
    return resource_list


def _queue(spec: DeploySpec, settings: Lambda, tags: Mapping[str, str]) -> Resource:
    queue = settings.queue
    assert queue is not None
    properties = {
        "EventSourceArn": queue.arn,
        "FunctionName": alias_of(spec.name),
        "BatchSize": queue.batch_size,
        "MaximumBatchingWindowInSeconds": queue.window,
        "FunctionResponseTypes": ["ReportBatchItemFailures"],
        "ScalingConfig": queue.concurrency and {"MaximumConcurrency": queue.concurrency},
    }
    name, kind = f"{alias_of(spec.name)}|{queue.arn}", "AWS::Lambda::EventSourceMapping"
    return Resource("Queue", kind, name, without_none(properties), ("Alias",), owner_tags(tags))
