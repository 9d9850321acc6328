"""A Lambda function as resources: the function, a version, the alias that receives requests, and
their sources.

A version cannot be changed and has a number that is not known before; so the function's description
begins with a hash of all that makes it what it is, and a version is found by the hash that it was
published with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.alarms import AlarmMetrics, Alarms, alarms
from tsx_cli.deploy.aws.iam_policies import role
from tsx_cli.deploy.aws.kinds.autoscaling import predefined, scaling
from tsx_cli.deploy.aws.kinds.log_group import log_group
from tsx_cli.deploy.engine.facts import Facts, lasting, tags_of
from tsx_cli.deploy.engine.resources import Ref, Resource, digest
from tsx_cli.deploy.engine.shapes import some
from tsx_cli.deploy.spec import DeploySpec, Lambda, ManagedInstances

ALIAS = "live"
MANAGED = "lambda.managed_instances"
LARGEST = 10_240  # MiB of memory and of /tmp where AWS manages no instances for one


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Everything of one function. Raises UsageError for what Lambda does not do."""
    own = spec.lambda_
    _check(spec, own)
    tags = tags_of(spec, facts)
    made = (
        []
        if own.managed_instances is None or own.managed_instances.provider
        else [_provider(spec, own.managed_instances, tags)]
    )
    made += [role(spec, facts.account, facts.region, tags)] if own.role is None else []
    made += log_group(spec, tags)
    function, content = _function(spec, facts)
    made.append(
        Resource(
            "Function",
            "AWS::Lambda::Function",
            spec.name,
            function,
            tuple(each.id for each in made),
            tags,
        )
    )
    version = Resource(
        "Version",
        "AWS::Lambda::Version",
        f"{spec.name}:{content}",
        {"FunctionName": spec.name},
        ("Function",),
    )
    watched = _alarms(spec, tags, content)
    needs = ("Version", *(alarm.id for alarm in watched.made))
    alias = {"FunctionName": spec.name, "Name": ALIAS, "FunctionVersion": Ref("Version", "Version")}
    made += [version, *watched.made]
    canary = spec.canary
    shift = {} if canary is None else {**canary.model_dump(), "alarms": watched.names}
    made.append(
        Resource("Alias", "AWS::Lambda::Alias", alias_of(spec.name), alias, needs, how=shift)
    )
    if own.provisioned is not None or own.autoscaling is not None:
        made += _provisioned(spec, own)
    if own.url != "off":
        made += _url(spec, own)
    if own.queue is not None:
        made.append(_queue(spec, own, tags))
    return made


def alias_of(name: str) -> str:
    return f"{name}:{ALIAS}"


def scaling_rule(name: str) -> str:
    return f"tsx-{name}-in-use"


def scaled(name: str) -> str:
    """As Application Auto Scaling calls the alias's provisioned concurrency."""
    return f"lambda|function:{alias_of(name)}|lambda:function:ProvisionedConcurrency"


def _check(spec: DeploySpec, own: Lambda) -> None:
    if own.managed_instances is None:
        too_large = [
            f"lambda.{key}"
            for key, value in (("memory", own.memory), ("storage", own.storage))
            if value > LARGEST
        ]
        if too_large:
            raise UsageError(
                f"{too_large[0]}: Lambda gives at most {LARGEST} MiB; use {MANAGED} for more"
            )
        return
    clashes = {
        "lambda.provisioned": own.provisioned,
        "lambda.autoscaling": own.autoscaling,
        "lambda.reserved": own.reserved,
    }
    fields = [key for key, value in clashes.items() if value is not None]
    if fields:
        raise UsageError(
            f"a function on managed instances has no {', '.join(fields)}: its instances always run."
            " Remove one of them"
        )
    managed = own.managed_instances
    if managed.gpu_memory is not None and own.architecture != "x86_64":
        raise UsageError(
            f"{MANAGED}.gpu_memory: Lambda has GPUs for x86_64 only, not for {own.architecture}"
        )
    if managed.provider is None and not (managed.subnets and managed.operator_role):
        raise UsageError(
            f"{MANAGED} needs subnets and operator_role for the instances, or provider, the ARN of"
            " a capacity provider"
        )


def _provider(spec: DeploySpec, managed: ManagedInstances, tags: Mapping[str, str]) -> Resource:
    types, most = list(managed.instance_types) or None, managed.most_cpus
    properties = {
        "PermissionsConfig": {"CapacityProviderOperatorRoleArn": managed.operator_role},
        "VpcConfig": {
            "SubnetIds": list(managed.subnets),
            "SecurityGroupIds": list(managed.security_groups),
        },
        "InstanceRequirements": some(
            {"Architectures": [spec.lambda_.architecture], "AllowedInstanceTypes": types}
        ),
        "CapacityProviderScalingConfig": most and {"MaxVCpuCount": most},
    }
    kind = "AWS::Lambda::CapacityProvider"
    return Resource(
        "CapacityProvider", kind, f"tsx-{spec.name}", some(properties), tags=lasting(tags)
    )


def _function(spec: DeploySpec, facts: Facts) -> tuple[dict[str, Any], str]:
    """Its properties, and the hash of what makes another version of it."""
    own, queue = spec.lambda_, spec.lambda_.queue
    variables = {}  # docs/guides/deploy/lambda.md has these
    if own.streaming:
        variables["TSX_LAMBDA_ANSWERS"] = "streamed"
    if queue is not None and queue.results is not None:
        variables["TSX_LAMBDA_RESULTS"] = queue.results
        variables["TSX_LAMBDA_RESULTS_OWNER"] = queue.results_owner or facts.account
    variables |= spec.env
    network = {
        "SubnetIds": sorted(own.subnets),
        "SecurityGroupIds": sorted(own.security_groups),
    }
    properties = some(
        {
            "PackageType": "Image",
            "Code": {"ImageUri": facts.image},
            "Role": own.role or Ref("Role", "Arn"),
            "MemorySize": own.memory,
            "Timeout": own.timeout,
            "EphemeralStorage": {"Size": own.storage},
            "Architectures": [own.architecture],
            "Environment": {"Variables": variables} if variables else None,
            "VpcConfig": network if own.subnets else None,
            **_managed(own.managed_instances),
        }
    )
    content = digest([properties, facts.sha256])
    properties["Description"] = (
        f"tsx {content} {facts.sha256[:16]} {facts.model_name}/{facts.model_version}"[:256]
    )
    if own.reserved is not None:
        properties["ReservedConcurrentExecutions"] = own.reserved
    return properties, content


def _managed(managed: ManagedInstances | None) -> dict[str, Any]:
    if managed is None:
        return {}
    memory, gpu = managed.memory_per_cpu, managed.gpu_memory
    config = {
        "CapacityProviderArn": managed.provider or Ref("CapacityProvider", "Arn"),
        "PerExecutionEnvironmentMaxConcurrency": managed.concurrency,
        "ExecutionEnvironmentMemoryGiBPerVCpu": memory and float(memory),
    }
    return {
        "CapacityProviderConfig": {"LambdaManagedInstancesCapacityProviderConfig": some(config)},
        "AcceleratorConfig": gpu and {"AcceleratorMemorySize": gpu},
    }


def _alarms(spec: DeploySpec, tags: Mapping[str, str], content: str) -> Alarms:
    """They watch the new version alone: among all requests the tenth that fails is hard to see.

    Each version has its own, by its `content`: an alarm that is given another version to watch
    stays in the state that the one before left.
    """
    if spec.canary is None:
        return Alarms([], [])
    through = {"FunctionName": spec.name, "Resource": alias_of(spec.name)}
    version: dict[str, str | Ref] = {
        **through,
        "ExecutedVersion": Ref("Version", "Version", content),
    }
    answers = (
        None if spec.lambda_.url == "off" else ("Url5xxCount", through)
    )  # a model's error is an answer, and no failed invocation
    metrics = AlarmMetrics("AWS/Lambda", "Errors", "Duration", 1, version, answers)
    return alarms(spec.canary.alarms, metrics, f"tsx-{spec.name}", lasting(tags), ("Version",))


def _provisioned(spec: DeploySpec, own: Lambda) -> list[Resource]:
    """With a rule that scales it, how many there are is the rule's business: only the first number
    is ours.
    """
    number = own.provisioned if own.autoscaling is None else own.autoscaling.min
    which = {"FunctionName": spec.name, "Qualifier": ALIAS}
    fields = {"ProvisionedConcurrentExecutions": number}
    fixed, how = (which | fields, {}) if own.autoscaling is None else (which, fields)
    made = [
        Resource(
            "Provisioned",
            "Tsx::Lambda::ProvisionedConcurrency",
            alias_of(spec.name),
            fixed,
            ("Alias",),
            how=how,
        )
    ]
    if own.autoscaling is None:
        return made
    metric = predefined("LambdaProvisionedConcurrencyUtilization")
    return made + scaling(
        scaled(spec.name), scaling_rule(spec.name), own.autoscaling, metric, "Provisioned"
    )


def _url(spec: DeploySpec, own: Lambda) -> list[Resource]:
    """Who calls one that is public needs both permissions; within an account, a caller's own policy
    is enough.
    """
    public = own.url == "public"
    mode = "RESPONSE_STREAM" if own.streaming else "BUFFERED"
    properties = {
        "TargetFunctionArn": spec.name,
        "Qualifier": ALIAS,
        "AuthType": "NONE" if public else "AWS_IAM",
        "InvokeMode": mode,
    }
    made = [Resource("Url", "AWS::Lambda::Url", alias_of(spec.name), properties, ("Alias",))]
    by_url: dict[str, Any] = {"Action": "lambda:InvokeFunctionUrl", "FunctionUrlAuthType": "NONE"}
    by_name: dict[str, Any] = {"Action": "lambda:InvokeFunction", "InvokedViaFunctionUrl": True}
    for number, way in enumerate((by_url, by_name) if public else (), start=1):
        fields = {"FunctionName": alias_of(spec.name), "Principal": "*", **way}
        name = f"{alias_of(spec.name)}|tsx-{digest(fields)}"
        kind, id = "AWS::Lambda::Permission", f"UrlPermission{number}"
        made.append(Resource(id, kind, name, fields, ("Alias",)))
    return made


def _queue(spec: DeploySpec, own: Lambda, tags: Mapping[str, str]) -> Resource:
    queue = own.queue
    assert queue is not None
    properties = {
        "EventSourceArn": queue.arn,
        "FunctionName": alias_of(spec.name),
        "BatchSize": queue.batch_size,
        "MaximumBatchingWindowInSeconds": queue.window,
        "FunctionResponseTypes": ["ReportBatchItemFailures"],
        "ScalingConfig": queue.concurrency and {"MaximumConcurrency": queue.concurrency},
    }
    place, kind = f"{alias_of(spec.name)}|{queue.arn}", "AWS::Lambda::EventSourceMapping"
    return Resource("Queue", kind, place, some(properties), ("Alias",), lasting(tags))
