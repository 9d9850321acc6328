"""A deployment as an inference component: its model, its part of a shared endpoint, the scaling of
its copies, and what wakes it.
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
    predefined,
    scales,
    scaling,
    without_others,
)
from tsx_cli.deploy.aws.kinds.cloudwatch import alarm_states, alarms_of
from tsx_cli.deploy.aws.kinds.log_group import log_group
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.engine import OWNER
from tsx_cli.deploy.engine.facts import Facts, lasting
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Observed, Ref, Resource, digest, numbered
from tsx_cli.deploy.engine.shapes import filled, shapes
from tsx_cli.deploy.preflight.limits import NEURON_MACHINES
from tsx_cli.deploy.sagemaker import shared_endpoints as shared
from tsx_cli.deploy.sagemaker.deployment import SageMakerTarget, objects_of
from tsx_cli.deploy.sagemaker.kinds import COMPONENT, LONGEST_UPDATE, InferenceComponent
from tsx_cli.deploy.sagemaker.resources import (
    SHAPES,
    VARIANT,
    canary_alarms,
    model_properties,
    network,
    prefix,
    rolled_back,
    scaling_rule,
    server_values,
    uploaded,
    uploads,
)
from tsx_cli.deploy.sagemaker.shared_endpoints import (
    COMPONENTS,
    ENDPOINT,
    MODEL,
    EndpointMembership,
)
from tsx_cli.deploy.spec import ACCELERATED, Autoscaling, Canary, Component, DeploySpec, SageMaker

LOG = "/aws/sagemaker/InferenceComponents/{}"
# the tag of a model that says what a copy of it takes, so that a rollback restores that too
RESOURCES = "tsx:resources"
METRIC = "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution"
# As many instances as SageMaker has started for the copies stay when the endpoint gets another
# configuration.
KEPT = {
    "RetainAllVariantProperties": True,
    "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DesiredWeight"}],
}
LEAST_STEP = 5  # percent of the copies that an update replaces at a time
KEYS = {  # by the words of that tag, the place in a component's specification
    "cpus": ("ComputeResourceRequirements", "NumberOfCpuCoresRequired", float),
    "memory": ("ComputeResourceRequirements", "MinMemoryRequiredInMb", int),
    "gpus": ("ComputeResourceRequirements", "NumberOfAcceleratorDevicesRequired", float),
    "startup": ("StartupParameters", "ContainerStartupHealthCheckTimeoutInSeconds", int),
    "download": ("StartupParameters", "ModelDataDownloadTimeoutInSeconds", int),
}


def resources(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Raises UsageError for what SageMaker does not do."""
    own, component = spec.sagemaker, spec.sagemaker.component
    assert component is not None
    member = EndpointMembership(COMPONENTS, component.endpoint)
    _check(spec, component)
    tags = shared.member_tags(spec, facts, member)
    made, url = uploaded(spec, facts, tags, f"{uploads(spec.name)}{facts.sha256[:16]}/model.tar.gz")
    # The network is the endpoint's.
    alone = spec.model_copy(
        update={"sagemaker": own.model_copy(update={"subnets": (), "network_isolation": False})}
    )
    properties = model_properties(alone, facts, url)
    if own.role is None:
        del properties["ExecutionRoleArn"]
    takes = _takes(spec, component)
    name = prefix(spec.name) + digest([properties, takes])
    made.append(
        Resource("Model", MODEL, name, properties, ("ModelData",), {**tags, RESOURCES: takes})
    )
    if component.manage_endpoint:
        made += shared.endpoint_resources(member, _config(own, component), KEPT, ("Model",))
    watched = canary_alarms(spec, tags, {"InferenceComponentName": spec.name})
    wanted: dict[str, Any] = {"EndpointName": component.endpoint, "VariantName": component.variant}
    wanted["Specification"] = {"ModelName": name, **_specification(takes)}
    fewest = 0 if own.autoscaling is None else own.autoscaling.min
    copies = {"RuntimeConfig": {"CopyCount": max(component.copies, fewest)}}
    wanted |= copies if own.autoscaling is None else {}
    if spec.canary is not None:
        wanted["DeploymentConfig"] = _rolling(spec.canary, watched.names)
    log = log_group(spec, tags, LOG.format(spec.name))
    needs = (
        "Model",
        *(["Endpoint"] if component.manage_endpoint else []),
        *(each.id for each in (*watched.made, *log)),
    )
    made += [
        *watched.made,
        *log,
        Resource(
            "Component",
            COMPONENT,
            spec.name,
            wanted,
            needs,
            tags,
            {} if own.autoscaling is None else copies,
        ),
    ]
    return made + ([] if own.autoscaling is None else _scaling(spec.name, own.autoscaling, tags))


def _check(spec: DeploySpec, component: Component) -> None:
    own, canary = spec.sagemaker, spec.canary
    if component.manage_endpoint:
        shared.check_role(spec, component.endpoint)
    if component.manage_endpoint and component.variant != VARIANT:
        raise UsageError(
            f"sagemaker.component.variant is {component.variant}: only an endpoint with"
            " manage_endpoint=false has another"
        )
    if NEURON_MACHINES.match(own.instance_type):
        raise UsageError(
            f"sagemaker.component: tsx shares no {own.instance_type} between components; give the"
            " model an endpoint of its own"
        )
    if component.gpus is not None and not ACCELERATED.match(own.instance_type):
        raise UsageError(
            f"sagemaker.component.gpus is {component.gpus}, and {own.instance_type} has none: set"
            " sagemaker.instance_type"
        )
    if canary is None:
        return
    if steps(canary.percent) * canary.bake > LONGEST_UPDATE:
        raise UsageError(
            f"--canary {canary.percent:g}% --bake {canary.bake}s: SageMaker waits after each of"
            f" {steps(canary.percent)} steps, and allows {LONGEST_UPDATE // 3600} hours for all."
            " Raise the share, or lower the time"
        )
    if canary.percent < LEAST_STEP:
        raise UsageError(
            f"--canary {canary.percent:g}%: SageMaker replaces {LEAST_STEP} to 50 % of a"
            " component's copies at a time"
        )
    if own.autoscaling is None and component.copies < 2:
        raise UsageError(
            "--canary: SageMaker replaces up to half of a component's copies at a time, and"
            f" sagemaker.component.copies is {component.copies}. Set it to 2 or more, or remove"
            " --canary"
        )


def steps(percent: float) -> int:
    return math.ceil(100 / percent)


def _takes(spec: DeploySpec, component: Component) -> str:
    """As the value of a tag, which has no quotes or braces."""
    own = spec.sagemaker
    words = {"cpus": component.cpus, "memory": component.memory, "gpus": component.gpus}
    words |= {"startup": own.startup_timeout, "download": own.download_timeout}
    return " ".join(f"{key}={value:.9g}" for key, value in words.items() if value is not None)


def _specification(takes: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in takes.split():
        key, _, value = word.partition("=")
        part, name, kind = KEYS[key]
        found.setdefault(part, {})[name] = kind(value)
    return found


def _config(own: SageMaker, component: Component) -> dict[str, Any]:
    instances = min(max(own.instances, component.min_instances), component.max_instances)
    values = {
        **server_values(own),
        **component.model_dump(include={"min_instances", "max_instances"}),
        "instances": instances,
        "role": own.role,
        "network": network(own),
        "isolated": own.network_isolation or None,
        "kms_key": own.kms_key,
    }
    found: dict[str, Any] = filled(shapes(SHAPES)["shared config"], values)
    return found


def _rolling(canary: Canary, names: list[str]) -> dict[str, Any]:
    policy = {
        "MaximumBatchSize": {"Type": "CAPACITY_PERCENT", "Value": round(canary.percent)},
        "WaitIntervalInSeconds": canary.bake,
        "MaximumExecutionTimeoutInSeconds": LONGEST_UPDATE,
    }
    return {"RollingUpdatePolicy": policy, **rolled_back(names)}


def scaled(name: str) -> str:
    return f"sagemaker|inference-component/{name}|sagemaker:inference-component:DesiredCopyCount"


def waking_rule(name: str) -> str:
    return f"tsx-{name}-wake"


def _scaling(name: str, wanted: Autoscaling, tags: Mapping[str, str]) -> list[Resource]:
    """Tracking a metric cannot leave zero: there a request that finds no copy sets off an alarm,
    which adds the first one.

    https://docs.aws.amazon.com/sagemaker/latest/dg/endpoint-auto-scaling-zero-instances.html
    """
    place, kinds = scaled(name), shapes(SHAPES)
    made = scaling(place, scaling_rule(name), wanted, predefined(METRIC), "Component")
    if wanted.min > 0:
        return made
    rule = {"policy": waking_rule(name), "resource": place.split("|")[1]}
    text = f"A request found no copy of {name}: the first one is started"
    action = {"description": text, "name": name, "policy": Ref("WakePolicy", "Ref")}
    policy, alarm = filled(kinds["wake policy"], rule), filled(kinds["wake alarm"], action)
    return [
        *made,
        Resource("WakePolicy", POLICY, f"{place}|{rule['policy']}", policy, ("ScalableTarget",)),
        Resource(
            "WakeAlarm",
            "AWS::CloudWatch::Alarm",
            f"{rule['policy']}-{digest(alarm, 4)}",
            alarm,
            ("WakePolicy",),
            lasting(tags),
        ),
    ]


class ComponentTarget(SageMakerTarget):
    """A deployment that is an inference component."""

    def __init__(self, member: EndpointMembership) -> None:
        self.member = member

    def log_group(self, name: str) -> str:
        return LOG.format(name)

    def wanted(self, cloud: Cloud, spec: DeploySpec, facts: Facts) -> list[Resource]:
        return shared.noted(cloud, self.member, resources(spec, facts))

    def belongings(self, cloud: Cloud, name: str, *, purge: bool = False) -> list[Resource]:
        """A component takes its copies with it; the endpoint goes with the last component."""
        models = numbered("Model", MODEL, shared.models_of(cloud, name))
        is_last = not shared.other_components(cloud, self.member.endpoint, name)
        endpoint = shared.endpoint_belongings(cloud, self.member, models, is_last=is_last)
        found = [*(objects_of(cloud, name, models) if purge else []), *models, *endpoint]
        if _component(cloud, name) is not None:
            found.append(
                Resource(
                    "Component",
                    COMPONENT,
                    name,
                    {},
                    tuple(each.id for each in (*models, *endpoint)),
                )
            )
        return [*found, *_beside(cloud, name)]

    def obsolete(
        self, cloud: Cloud, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        names = {each.name for each in wanted}
        gone = shared.superseded(self.versions(cloud, spec.name), spec.keep, names)
        beside = [each for each in _beside(cloud, spec.name) if each.name not in names]
        beside = without_others(cloud, beside, scaling_rule(spec.name))
        is_managed = any(each.kind == ENDPOINT for each in wanted)
        configs = shared.former(cloud, self.member, tuple(names)) if is_managed else []
        return [
            *numbered("Model", MODEL, gone),
            *configs,
            *beside,
        ]

    def versions(self, cloud: Cloud, name: str) -> list[DeployedVersion]:
        found = _component(cloud, name)
        return shared.versions_of(
            shared.models_of(cloud, name),
            None if found is None else found.properties["Specification"].get("ModelName"),
        )

    def going_back(self, cloud: Cloud, name: str, version: DeployedVersion) -> list[Resource]:
        """Raises CliError while SageMaker changes the component: when that is over, another version
        may be the one before.
        """
        found = _component(cloud, name)
        if found is not None and found.state == "changing":
            raise CliError(
                f"{name} is {found.outputs['status']}, and SageMaker accepts no changes until that"
                " ends. `tsx deploy status` shows its progress: roll back after that"
            )
        wanted = {"ModelName": version.id, **_specification(version.tags.get(RESOURCES, ""))}
        return [
            Resource("Component", COMPONENT, name, {"Specification": wanted}, tags=version.tags)
        ]

    def promoting(self, cloud: Cloud, name: str) -> list[Resource]:
        raise CliError(
            f"SageMaker replaces the copies of {name} by itself, a part of them at a time, and"
            " cannot be hurried; `tsx deploy status` shows its progress. To replace all at once"
            " next time, omit --canary"
        )

    def status(self, cloud: Cloud, name: str) -> dict[str, Any] | None:
        found = _component(cloud, name)
        if found is None:
            return None
        specification = found.properties["Specification"]
        return {
            **shared.common_status(cloud, name, found, self.member),
            "model name": specification.get("ModelName"),
            "copies": found.outputs["copies"],
            "desired copies": found.properties["RuntimeConfig"]["CopyCount"],
            "resources": specification.get("ComputeResourceRequirements"),
            "alarms": alarm_states(cloud, alarms_of(cloud, name, "InferenceComponentName")),
            "scales": scales(_beside(cloud, name)),
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
                way = (
                    "it has no copy now; where it scales from zero, this request starts one: send"
                    " it again in some minutes"
                )
                raise CloudError(f"{error.message} ({way})", error.code) from error
            raise


def _component(cloud: Cloud, name: str) -> Observed | None:
    found = InferenceComponent().observe(cloud, name)
    return found if found is not None and found.tags.get(OWNER) == name else None


def _beside(cloud: Cloud, name: str) -> list[Resource]:
    """Its alarms, and how it scales."""
    names = alarms_of(cloud, name, "InferenceComponentName")
    found = numbered("Alarm", "AWS::CloudWatch::Alarm", names)
    if ScalableTarget().observe(cloud, scaled(name)) is None:
        return found
    own = [
        f"{scaled(name)}|{each['PolicyName']}"
        for each in policies(cloud, scaled(name))
        if each["PolicyName"] in (scaling_rule(name), waking_rule(name))
    ]
    rules = numbered("ScalingPolicy", POLICY, own, ("ScalableTarget",))
    return [*found, Resource("ScalableTarget", TARGET, scaled(name), {}, ("Component",)), *rules]
