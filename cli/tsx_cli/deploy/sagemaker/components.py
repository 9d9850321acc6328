"""A deployment as an inference component of a shared endpoint.

The component consists of a model, the resources of each copy, and rules that scale the copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_cli.common.client import Response
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.kinds.autoscaling import (
    POLICY,
    TARGET,
    ScalableTarget,
    policies,
    predefined_metric,
    scaled_dimensions,
    scaling_resources,
    without_foreign_scaling,
)
from tsx_cli.deploy.aws.kinds.cloudwatch import alarm_states, alarms_of
from tsx_cli.deploy.aws.kinds.log_group import log_group
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.facts import Facts, owner_tags
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import (
    Observed,
    Ref,
    Resource,
    digest,
    ids_of,
    numbered_resources,
    owned,
)
from tsx_cli.deploy.engine.shapes import fill, read_shapes
from tsx_cli.deploy.preflight.limits import NEURON_MACHINES
from tsx_cli.deploy.sagemaker import shared_endpoints as shared
from tsx_cli.deploy.sagemaker.deployment import objects_of
from tsx_cli.deploy.sagemaker.kinds import COMPONENT, MAX_UPDATE_S, InferenceComponent
from tsx_cli.deploy.sagemaker.resources import (
    SHAPES,
    VARIANT,
    archive_in_bucket,
    canary_alarms,
    model_properties,
    name_prefix,
    rollback_config,
    scaling_rule,
    server_values,
    upload_prefix,
    vpc_config,
)
from tsx_cli.deploy.sagemaker.shared_endpoints import (
    COMPONENTS,
    ENDPOINT,
    MODEL,
    EndpointMembership,
)
from tsx_cli.deploy.spec import ACCELERATED, Autoscaling, Canary, Component, DeploySpec, SageMaker

LOG = "/aws/sagemaker/InferenceComponents/{}"
# The tag of a model with the resources of a copy, which a rollback restores.
RESOURCES = "tsx:resources"
METRIC = "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
# The endpoint keeps the instances that the copies need when its configuration changes.
ENDPOINT_UPDATE_SETTINGS = {
    "RetainAllVariantProperties": True,
    "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DesiredWeight"}],
}
MIN_STEP_PERCENT = 5  # smallest percentage of the copies that an update replaces at a time
# Key in the tag -> section, key and type in a component's specification.
RESOURCE_KEYS = {
    "cpus": ("ComputeResourceRequirements", "NumberOfCpuCoresRequired", float),
    "memory": ("ComputeResourceRequirements", "MinMemoryRequiredInMb", int),
    "gpus": ("ComputeResourceRequirements", "NumberOfAcceleratorDevicesRequired", float),
    "startup": ("StartupParameters", "ContainerStartupHealthCheckTimeoutInSeconds", int),
    "download": ("StartupParameters", "ModelDataDownloadTimeoutInSeconds", int),
}


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Return the resources of a component.

    Raises:
        UsageError: SageMaker does not support the specification.
    """
    settings, component = spec.sagemaker, spec.sagemaker.component
    assert component is not None
    member = EndpointMembership(COMPONENTS, component.endpoint)
    _check(spec, component)
    tags = shared.member_tags(spec, facts, member)
    wanted_resources, url = archive_in_bucket(
        spec, facts, tags, f"{upload_prefix(spec.name)}{facts.sha256[:16]}/model.tar.gz"
    )
    # The network belongs to the endpoint's configuration, so the model is described without it.
    model_spec = spec.model_copy(
        update={
            "sagemaker": settings.model_copy(update={"subnets": (), "network_isolation": False})
        }
    )
    properties = model_properties(model_spec, facts, url)
    if settings.role is None:
        del properties["ExecutionRoleArn"]
    resources_text = _resources_text(spec, component)
    name = name_prefix(spec.name) + digest([properties, resources_text])
    wanted_resources.append(
        Resource(
            "Model", MODEL, name, properties, ("ModelData",), {**tags, RESOURCES: resources_text}
        )
    )
    if component.manage_endpoint:
        wanted_resources += shared.endpoint_resources(
            member, _config(settings, component), ENDPOINT_UPDATE_SETTINGS, ("Model",)
        )
    alarms = canary_alarms(spec, tags, {"InferenceComponentName": spec.name})
    component_properties: dict[str, Any] = {
        "EndpointName": component.endpoint,
        "VariantName": component.variant,
        "Specification": {"ModelName": name, **_specification(resources_text)},
    }
    min_copies = 0 if settings.autoscaling is None else settings.autoscaling.min
    copies = {"RuntimeConfig": {"CopyCount": max(component.copies, min_copies)}}
    component_properties |= copies if settings.autoscaling is None else {}
    if spec.canary is not None:
        component_properties["DeploymentConfig"] = _rolling_update(spec.canary, alarms.names)
    log = log_group(spec, tags, LOG.format(spec.name))
    needs = (
        "Model",
        *(["Endpoint"] if component.manage_endpoint else []),
        *ids_of((*alarms.resources, *log)),
    )
    wanted_resources += [
        *alarms.resources,
        *log,
        Resource(
            "Component",
            COMPONENT,
            spec.name,
            component_properties,
            needs,
            tags,
            {} if settings.autoscaling is None else copies,
        ),
    ]
    return wanted_resources + (
        []
        if settings.autoscaling is None
        else _scaling_resources(spec.name, settings.autoscaling, tags)
    )


def _check(spec: DeploySpec, component: Component) -> None:
    settings, canary = spec.sagemaker, spec.canary
    if component.manage_endpoint:
        shared.check_role(spec, component.endpoint)
    if component.manage_endpoint and component.variant != VARIANT:
        raise UsageError(
            f"sagemaker.component.variant is {component.variant}: only an endpoint with"
            " manage_endpoint=false has another"
        )
    if NEURON_MACHINES.match(settings.instance_type):
        raise UsageError(
            f"sagemaker.component: tsx shares no {settings.instance_type} between components; give"
            " the model an endpoint of its own"
        )
    if component.gpus is not None and not ACCELERATED.match(settings.instance_type):
        raise UsageError(
            f"sagemaker.component.gpus is {component.gpus}, and {settings.instance_type} has none:"
            " set sagemaker.instance_type"
        )
    if canary is None:
        return
    if number_of_steps(canary.percent) * canary.bake > MAX_UPDATE_S:
        raise UsageError(
            f"--canary {canary.percent:g}% --bake {canary.bake}s: SageMaker waits after each of"
            f" {number_of_steps(canary.percent)} steps, and allows {MAX_UPDATE_S // 3600} hours for"
            " all. Raise the share, or lower the time"
        )
    if canary.percent < MIN_STEP_PERCENT:
        raise UsageError(
            f"--canary {canary.percent:g}%: SageMaker replaces {MIN_STEP_PERCENT} to 50 % of a"
            " component's copies at a time"
        )
    if settings.autoscaling is None and component.copies < 2:
        raise UsageError(
            "--canary: SageMaker replaces up to half of a component's copies at a time, and"
            f" sagemaker.component.copies is {component.copies}. Set it to 2 or more, or remove"
            " --canary"
        )


def number_of_steps(percent: float) -> int:
    return math.ceil(100 / percent)


def _resources_text(spec: DeploySpec, component: Component) -> str:
    """Return the resources of a copy as the value of a tag, without quotes and braces."""
    settings = spec.sagemaker
    sizes = {"cpus": component.cpus, "memory": component.memory, "gpus": component.gpus}
    sizes |= {"startup": settings.startup_timeout, "download": settings.download_timeout}
    return " ".join(f"{key}={value:.9g}" for key, value in sizes.items() if value is not None)


def _specification(resources_text: str) -> dict[str, Any]:
    specification: dict[str, Any] = {}
    for pair in resources_text.split():
        key, _, value = pair.partition("=")
        section, name, kind = RESOURCE_KEYS[key]
        specification.setdefault(section, {})[name] = kind(value)
    return specification


def _config(settings: SageMaker, component: Component) -> dict[str, Any]:
    instances = min(max(settings.instances, component.min_instances), component.max_instances)
    values = {
        **server_values(settings),
        **component.model_dump(include={"min_instances", "max_instances"}),
        "instances": instances,
        "role": settings.role,
        "network": vpc_config(settings),
        "isolated": settings.network_isolation or None,
        "kms_key": settings.kms_key,
    }
    config: dict[str, Any] = fill(read_shapes(SHAPES)["shared config"], values)
    return config


def _rolling_update(canary: Canary, names: list[str]) -> dict[str, Any]:
    policy = {
        "MaximumBatchSize": {"Type": "CAPACITY_PERCENT", "Value": round(canary.percent)},
        "WaitIntervalInSeconds": canary.bake,
        "MaximumExecutionTimeoutInSeconds": MAX_UPDATE_S,
    }
    return {"RollingUpdatePolicy": policy, **rollback_config(names)}


def scaling_target(name: str) -> str:
    return f"sagemaker|inference-component/{name}|sagemaker:inference-component:DesiredCopyCount"


def wake_rule(name: str) -> str:
    return f"tsx-{name}-wake"


def _scaling_resources(
    name: str, autoscaling: Autoscaling, tags: Mapping[str, str]
) -> list[Resource]:
    """Return the rules that scale the copies.

    A rule that tracks a metric cannot scale up from zero copies. An alarm adds the first copy when
    a request finds none.

    https://docs.aws.amazon.com/sagemaker/latest/dg/endpoint-auto-scaling-zero-instances.html
    """
    target, kinds = scaling_target(name), read_shapes(SHAPES)
    rules = scaling_resources(
        target, scaling_rule(name), autoscaling, predefined_metric(METRIC), "Component"
    )
    if autoscaling.min > 0:
        return rules
    rule = {"policy": wake_rule(name), "resource": target.split("|")[1]}
    text = f"A request found no copy of {name}: the first one is started"
    action = {"description": text, "name": name, "policy": Ref("WakePolicy", "Ref")}
    policy, alarm = fill(kinds["wake policy"], rule), fill(kinds["wake alarm"], action)
    return [
        *rules,
        Resource("WakePolicy", POLICY, f"{target}|{rule['policy']}", policy, ("ScalableTarget",)),
        Resource(
            "WakeAlarm",
            "AWS::CloudWatch::Alarm",
            f"{rule['policy']}-{digest(alarm, 4)}",
            alarm,
            ("WakePolicy",),
            owner_tags(tags),
        ),
    ]


class ComponentPlatform(shared.SharedEndpointPlatform):
    """A deployment that is an inference component."""

    def wanted_resources(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return shared.with_change_note(cloud, self.member, resources(spec, facts))

    def existing_resources(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        """Return the resources of a component, with the endpoint if this is its last component."""
        models = numbered_resources("Model", MODEL, shared.models_of(cloud, name))
        is_last = not shared.other_components(cloud, self.member.endpoint, name)
        endpoint = shared.existing_endpoint_resources(cloud, self.member, models, is_last=is_last)
        existing = [*(objects_of(cloud, name, models) if purge else []), *models, *endpoint]
        if _component(cloud, name) is not None:
            existing.append(
                Resource(
                    "Component",
                    COMPONENT,
                    name,
                    {},
                    ids_of((*models, *endpoint)),
                )
            )
        return [*existing, *_existing_alarms_and_scaling(cloud, name)]

    def obsolete_resources(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        names = {resource.name for resource in wanted}
        superseded = shared.superseded_models(self.versions(cloud, spec.name), spec.keep, names)
        extras = [
            resource
            for resource in _existing_alarms_and_scaling(cloud, spec.name)
            if resource.name not in names
        ]
        extras = without_foreign_scaling(cloud, extras, scaling_rule(spec.name))
        is_managed = any(resource.kind == ENDPOINT for resource in wanted)
        configs = (
            shared.endpoint_models_and_configs(cloud, self.member, tuple(names))
            if is_managed
            else []
        )
        return [*numbered_resources("Model", MODEL, superseded), *configs, *extras]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        component = _component(cloud, name)
        return shared.versions_of(
            shared.models_of(cloud, name),
            None if component is None else component.properties["Specification"].get("ModelName"),
        )

    def rollback_resources(
        self, cloud: Cloud, name: str, version: DeployedVersion
    ) -> list[Resource]:
        """Return the resources of an earlier version.

        Raises:
            CliError: The component is changing, so the previous version is not certain.
        """
        component = _component(cloud, name)
        if component is not None and component.state == "changing":
            raise CliError(
                f"{name} is {component.outputs['status']}, and SageMaker accepts no changes until"
                " that ends. `tsx deploy status` shows its progress: roll back after that"
            )
        specification = {"ModelName": version.id, **_specification(version.tags.get(RESOURCES, ""))}
        return [
            Resource(
                "Component", COMPONENT, name, {"Specification": specification}, tags=version.tags
            )
        ]

    def promotion_resources(self, cloud: Cloud, name: str) -> list[Resource]:
        raise CliError(
            f"SageMaker replaces the copies of {name} by itself, a part of them at a time, and"
            " cannot be hurried; `tsx deploy status` shows its progress. To replace all at once"
            " next time, omit --canary"
        )

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        component = _component(cloud, name)
        if component is None:
            return None
        specification = component.properties["Specification"]
        return {
            **shared.common_status(cloud, component, self.member),
            "model name": specification.get("ModelName"),
            "copies": component.outputs["copies"],
            "desired copies": component.properties["RuntimeConfig"]["CopyCount"],
            "resources": specification.get("ComputeResourceRequirements"),
            "alarms": alarm_states(cloud, alarms_of(cloud, name, "InferenceComponentName")),
            "scales": scaled_dimensions(_existing_alarms_and_scaling(cloud, name)),
        }

    def address(self, cloud: Cloud, name: str) -> dict[str, str]:
        return {"EndpointName": self.member.endpoint, "InferenceComponentName": name}

    def invoke(
        self, cloud: Cloud, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        try:
            return super().invoke(cloud, name, body, content_type, accept)
        except CloudError as error:
            if "no capacity" in error.message:
                advice = (
                    "it has no copy now; where it scales from zero, this request starts one: send"
                    " it again in some minutes"
                )
                raise CloudError(f"{error.message} ({advice})", error.code) from error
            raise


def _component(cloud: Cloud, name: str) -> Observed | None:
    return owned(InferenceComponent().observe(cloud, name), name)


def _existing_alarms_and_scaling(cloud: Cloud, name: str) -> list[Resource]:
    """Return the alarms and the scaling rules of a component."""
    names = alarms_of(cloud, name, "InferenceComponentName")
    alarms = numbered_resources("Alarm", "AWS::CloudWatch::Alarm", names)
    if ScalableTarget().observe(cloud, scaling_target(name)) is None:
        return alarms
    rule_names = [
        f"{scaling_target(name)}|{rule['PolicyName']}"
        for rule in policies(cloud, scaling_target(name))
        if rule["PolicyName"] in (scaling_rule(name), wake_rule(name))
    ]
    rules = numbered_resources("ScalingPolicy", POLICY, rule_names, ("ScalableTarget",))
    return [
        *alarms,
        Resource("ScalableTarget", TARGET, scaling_target(name), {}, ("Component",)),
        *rules,
    ]
