"""Endpoints that several deployments share, as components or as models of a multi-model endpoint.

The first deployment creates the endpoint, and destroying the last one removes it. The tags of a
deployment's models contain its form and the name of its endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.session import Cloud, own_bucket
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.engine.plan import differences
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import (
    Observed,
    Resource,
    digest,
    ids_of,
    numbered_resources,
    owned,
)
from tsx_cli.deploy.sagemaker.deployment import SageMakerPlatform, names_of
from tsx_cli.deploy.sagemaker.kinds import CHANGING_STATUSES, KINDS
from tsx_cli.deploy.sagemaker.resources import name_prefix
from tsx_cli.deploy.spec import DeploySpec

# The tag, COMPONENTS or MODELS, of endpoints that tsx created and of their deployments' models.
SHARED = "tsx:shared"
ENDPOINT_TAG = "tsx:endpoint"  # tag of a deployment's models with the name of the endpoint
COMPONENTS, MODELS = "components", "models"
MODEL = "AWS::SageMaker::Model"
CONFIG = "AWS::SageMaker::EndpointConfig"
ENDPOINT = "AWS::SageMaker::Endpoint"
# Environment variables that tsx deploy itself sets in a container.
OWN_VARIABLES = frozenset({"TSX_TARGET", "TSX_SAGEMAKER_MODE", "TSX_DEFAULTS"})


class EndpointMembership(NamedTuple):
    """The shared endpoint of a deployment."""

    form: str  # COMPONENTS or MODELS
    endpoint: str

    def __str__(self) -> str:
        return (
            f"{'a component of' if self.form == COMPONENTS else 'a model of the multi-model'}"
            f" endpoint '{self.endpoint}'"
        )


class SharedEndpointPlatform(SageMakerPlatform):
    """A deployment that shares its endpoint."""

    def __init__(self, member: EndpointMembership) -> None:
        self.member = member


def wanted_membership(spec: DeploySpec) -> EndpointMembership | None:
    """Return the shared endpoint that a specification names, if any.

    Raises:
        UsageError: A shared endpoint does not support the specification.
    """
    settings = spec.sagemaker
    if settings.component is not None and settings.multi_model is not None:
        raise UsageError(
            "sagemaker.component and sagemaker.multi_model are two ways to share an endpoint:"
            " remove one of them"
        )
    shared = settings.component or settings.multi_model
    if shared is None:
        return None
    member = EndpointMembership(
        MODELS if settings.component is None else COMPONENTS, shared.endpoint
    )
    clashing_keys = ("serverless", "asynchronous", "data_capture")
    fields = [f"sagemaker.{key}" for key in clashing_keys if getattr(settings, key)]
    if fields:
        raise UsageError(
            f"{', '.join(fields)}: SageMaker offers that for endpoints with one model only, and"
            f" this is {member}. Remove it"
        )
    if spec.create_role:
        raise UsageError(
            f"create_role: the role of a deployment is removed with it, and {member.endpoint} is"
            " the endpoint of several. Give --role; infra/iam/execution-sagemaker.json has its"
            " permissions"
        )
    return member


def check_role(spec: DeploySpec, endpoint: str) -> None:
    if spec.sagemaker.role is None:
        raise UsageError(
            f"sagemaker.role is not given: the ARN of the role that the endpoint {endpoint} runs"
            " with (--role); infra/iam/execution-sagemaker.json has its permissions"
        )


def membership(cloud: Cloud, name: str) -> EndpointMembership | None:
    """Return the shared endpoint of an existing deployment, if any."""
    tags = (model.tags for model in models_of(cloud, name).values())
    return next(
        (
            EndpointMembership(model_tags[SHARED], model_tags[ENDPOINT_TAG])
            for model_tags in tags
            if SHARED in model_tags
        ),
        None,
    )


def models_of(cloud: Cloud, name: str) -> dict[str, Observed]:
    """Return the models of a deployment by their names."""
    observed = {
        model_name: KINDS[MODEL].observe(cloud, model_name)
        for model_name in names_of(cloud, "model", name_prefix(name))
    }
    return {model_name: model for model_name, model in observed.items() if model is not None}


def complete_spec(cloud: Cloud, spec: DeploySpec) -> DeploySpec:
    """Complete a specification with the settings of the existing shared endpoint.

    A deployment changes only the settings that it sets itself.

    Raises:
        CliError: The deployment has another form now, or cannot share the endpoint.
        UsageError: A shared endpoint does not support the specification.
    """
    member = wanted_membership(spec)
    current: object = membership(cloud, spec.name)
    if member is not None and current is None:
        endpoint = KINDS[ENDPOINT].observe(cloud, spec.name)
        current = "an endpoint of its own" if owned(endpoint, spec.name) else None
    if current is not None and current != member:
        wanted_form = "an endpoint of its own" if member is None else member
        raise CliError(
            f"{spec.name} is {current} now, and the specification asks for {wanted_form}. Its"
            " clients would have to follow: deploy it under another --name, and then destroy this"
            " one"
        )
    return spec if member is None else _with_settings(cloud, spec, member)


def _with_settings(cloud: Cloud, spec: DeploySpec, member: EndpointMembership) -> DeploySpec:
    section, component = spec.sagemaker, spec.sagemaker.component
    endpoint = KINDS[ENDPOINT].observe(cloud, member.endpoint)
    is_managed = component is None or component.manage_endpoint
    if endpoint is None:
        if not is_managed:
            raise CliError(
                f"there is no endpoint '{member.endpoint}' in {cloud.region}, and"
                " sagemaker.component.manage_endpoint is false"
            )
        if spec.image is None and member.form == MODELS:
            raise UsageError(
                f"image is not given: all models of the endpoint {member.endpoint} run in one"
                " image. Build it once (--emit dockerfile) and give --image"
            )
        return spec
    pending_config = endpoint.outputs["pending"]  # configuration of an unfinished change
    config = KINDS[CONFIG].observe(
        cloud, pending_config or endpoint.properties["EndpointConfigName"]
    )
    if config is None:
        raise CliError(
            f"the endpoint {member.endpoint} has no configuration any more: delete it, and deploy"
            " again"
        )
    variant = config.properties["ProductionVariants"][0]
    _check_endpoint(endpoint, variant, member, is_managed)
    other_names = other_components(cloud, member.endpoint, spec.name)
    if endpoint.state == "failed" and (not is_managed or other_names):
        advice = (
            f". Destroy {', '.join(other_names)} on it first: it has to be created again"
            if other_names
            else ""
        )
        raise CliError(
            f"the endpoint {member.endpoint} is {endpoint.outputs['status']}:"
            f" {endpoint.reason}{advice}"
        )
    if component is not None:
        scaling = variant.get("ManagedInstanceScaling", {})
        component_settings = {
            "min_instances": scaling.get("MinInstanceCount"),
            "max_instances": scaling.get("MaxInstanceCount"),
        }
        component_settings |= {} if is_managed else {"variant": variant["VariantName"]}
        component = component.model_copy(
            update=_unset_only(component_settings, component.model_fields_set)
        )
        section = section.model_copy(update={"component": component})
        return spec.model_copy(
            update={
                "sagemaker": section.model_copy(
                    update=_unset_only(_settings(config.properties), section.model_fields_set)
                )
            }
        )
    model = KINDS[MODEL].observe(cloud, variant["ModelName"])
    if model is None or section.multi_model is None:
        raise CliError(
            f"the endpoint {member.endpoint} has no model {variant['ModelName']} any more: delete"
            " it, and deploy again"
        )
    container = model.properties["PrimaryContainer"]
    bucket = container["ModelDataUrl"].removeprefix("s3://").partition("/")[0]
    if section.bucket not in (None, bucket):
        raise CliError(
            f"sagemaker.bucket is {section.bucket}, and the models of {member.endpoint} are in"
            f" {bucket}: remove sagemaker.bucket"
        )
    settings = _settings({**config.properties, **model.properties})
    settings["bucket"] = None if bucket == own_bucket(cloud.account, cloud.region) else bucket
    cache = {"cache": container.get("MultiModelConfig", {}).get("ModelCacheSetting") != "Disabled"}
    multi = section.multi_model.model_copy(
        update=_unset_only(cache, section.multi_model.model_fields_set)
    )
    section = section.model_copy(
        update={"multi_model": multi, **_unset_only(settings, section.model_fields_set)}
    )
    env = {
        key: value
        for key, value in container.get("Environment", {}).items()
        if key not in OWN_VARIABLES
    }
    return spec.model_copy(
        update={
            "sagemaker": section,
            "image": spec.image or container["Image"],
            "env": spec.env or env,
        }
    )


def _check_endpoint(
    endpoint: Observed, variant: Mapping[str, Any], member: EndpointMembership, is_managed: bool
) -> None:
    """Check that a deployment can share an existing endpoint.

    Raises:
        CliError: The endpoint cannot be shared.
    """
    if is_managed and endpoint.tags.get(SHARED) != member.form:
        advice = (
            "; to use one of somebody else, set sagemaker.component.manage_endpoint=false"
            if member.form == COMPONENTS
            else ""
        )
        raise CliError(
            f"the endpoint {member.endpoint} already exists, and tsx deploy did not create it for"
            f" several {member.form}: give another name{advice}"
        )
    if endpoint.outputs["status"] == "Deleting":
        raise CliError(
            f"the endpoint {member.endpoint} is being deleted: deploy again when it is gone"
        )
    if member.form == COMPONENTS and "ModelName" in variant:
        raise CliError(
            f"the endpoint {member.endpoint} has a model of its own, and takes no components: give"
            " another endpoint"
        )


def other_components(cloud: Cloud, endpoint: str, name: str) -> list[str]:
    doing = f"listing the components of {endpoint}"
    components = cloud.list_items(
        "sagemaker",
        "list_inference_components",
        "InferenceComponents",
        doing,
        EndpointNameEquals=endpoint,
    )
    return sorted(
        component["InferenceComponentName"]
        for component in components
        if component["InferenceComponentName"] != name
    )


def _settings(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an endpoint by their keys under `sagemaker`; absent ones are None."""
    [variant, *_], network = properties["ProductionVariants"], properties.get("VpcConfig", {})
    return {
        "role": properties.get("ExecutionRoleArn"),
        "instance_type": variant.get("InstanceType"),
        "instances": variant.get("InitialInstanceCount"),
        "startup_timeout": variant.get("ContainerStartupHealthCheckTimeoutInSeconds"),
        "download_timeout": variant.get("ModelDataDownloadTimeoutInSeconds"),
        "network_isolation": properties.get("EnableNetworkIsolation"),
        "subnets": tuple(network.get("Subnets", ())) or None,
        "security_groups": tuple(network.get("SecurityGroupIds", ())) or None,
        "kms_key": properties.get("KmsKeyId"),
        "ami": variant.get("InferenceAmiVersion"),
        "routing": variant.get("RoutingConfig", {}).get("RoutingStrategy"),
    }


def _unset_only(settings: Mapping[str, Any], set_names: set[str]) -> dict[str, Any]:
    return {
        key: value for key, value in settings.items() if value is not None and key not in set_names
    }


def member_tags(spec: DeploySpec, facts: Facts, member: EndpointMembership) -> dict[str, str]:
    """Return the tags of a deployment, without tags that would change with other deployments."""
    omitted_keys = {"tsx:spec-sha"} | ({"tsx:image-digest"} if member.form == MODELS else set())
    tags = {key: value for key, value in tags_of(spec, facts).items() if key not in omitted_keys}
    return {**tags, SHARED: member.form, ENDPOINT_TAG: member.endpoint}


def endpoint_tags(member: EndpointMembership) -> dict[str, str]:
    """Return the tags of a shared endpoint, which has no owner (tsx:name)."""
    return {"tsx:target": "sagemaker", SHARED: member.form}


def endpoint_prefix(endpoint: str) -> str:
    """Return the prefix of the names of an endpoint's configurations and models.

    Names of deployments do not contain two hyphens in a row, so they cannot clash.
    """
    return f"tsx-{endpoint}--"


def endpoint_resources(
    member: EndpointMembership,
    config: Mapping[str, Any],
    update: Mapping[str, Any],
    needs: tuple[str, ...],
) -> list[Resource]:
    """Return an endpoint with its configuration.

    `update` contains properties for a change to another configuration.
    """
    tags = endpoint_tags(member)
    config_resource = Resource(
        "EndpointConfig",
        CONFIG,
        endpoint_prefix(member.endpoint) + digest(config),
        config,
        needs,
        tags,
    )
    return [
        config_resource,
        Resource(
            "Endpoint",
            ENDPOINT,
            member.endpoint,
            {"EndpointConfigName": config_resource.name, **update},
            ("EndpointConfig",),
            tags,
        ),
    ]


def with_change_note(
    cloud: Cloud, member: EndpointMembership, resources: list[Resource]
) -> list[Resource]:
    """Add a note about the changes for the other deployments on the endpoint."""
    endpoint = KINDS[ENDPOINT].observe(cloud, member.endpoint)
    config = next((resource for resource in resources if resource.id == "EndpointConfig"), None)
    current_config = (
        None
        if endpoint is None
        else KINDS[CONFIG].observe(cloud, endpoint.properties["EndpointConfigName"])
    )
    if config is None or current_config is None or current_config.name == config.name:
        return resources
    old_variant = current_config.properties["ProductionVariants"][0]
    new_variant = config.properties["ProductionVariants"][0]
    changes = ", ".join(
        f"{field.path} {field.old} -> {field.new}"
        for field in differences(old_variant, new_variant, {}, set())
    )
    note = (
        f"the endpoint {member.endpoint} changes for all {member.form} on it:"
        f" {changes or 'its role, network or key'}"
    )
    return [
        replace(resource, notes=(*resource.notes, note)) if resource is config else resource
        for resource in resources
    ]


def existing_endpoint_resources(
    cloud: Cloud, member: EndpointMembership, models: Sequence[Resource], *, is_last: bool
) -> list[Resource]:
    """Return the endpoint and the resources created for it, if its last deployment is removed.

    The list is empty if tsx did not create the endpoint. The models of the deployment are deleted
    last, because their tags name the endpoint.
    """
    endpoint = KINDS[ENDPOINT].observe(cloud, member.endpoint)
    if not is_last or (endpoint is not None and endpoint.tags.get(SHARED) != member.form):
        return []
    needs = ids_of(models)
    endpoint_parts = endpoint_models_and_configs(cloud, member, (), needs)
    part_ids = ids_of(endpoint_parts)
    return [
        *endpoint_parts,
        *(
            []
            if endpoint is None
            else [Resource("Endpoint", ENDPOINT, member.endpoint, {}, (*needs, *part_ids))]
        ),
    ]


def endpoint_models_and_configs(
    cloud: Cloud, member: EndpointMembership, kept_names: Sequence[str], needs: tuple[str, ...] = ()
) -> list[Resource]:
    """Return models and configurations of the endpoint itself, except `kept_names`."""
    prefix = endpoint_prefix(member.endpoint)
    names = [name for name in names_of(cloud, "model", prefix) if name not in kept_names]
    models = numbered_resources("EndpointModel", MODEL, names, needs)
    needed_ids = (*needs, *ids_of(models))
    names = [name for name in names_of(cloud, "endpoint_config", prefix) if name not in kept_names]
    return [*models, *numbered_resources("EndpointConfig", CONFIG, names, needed_ids)]


def versions_of(models: Mapping[str, Observed], current: str | None) -> list[DeployedVersion]:
    """Return the versions of a deployment, oldest first."""
    sorted_models = sorted(models.items(), key=lambda pair: (pair[1].outputs["made"], pair[0]))
    return [
        DeployedVersion(number, name, model.outputs["made"], model.tags, name == current)
        for number, (name, model) in enumerate(sorted_models, start=1)
    ]


def superseded_models(versions: Sequence[DeployedVersion], keep: int, names: set[str]) -> list[str]:
    """Return the models of versions beyond the newest `keep`; `names` are the wanted ones."""
    former_ids = [version.id for version in versions if version.id not in names]
    return former_ids[: -(keep - 1) or None]


def common_status(cloud: Cloud, observed: Observed, member: EndpointMembership) -> dict[str, Any]:
    """Return the first fields of `tsx deploy status`; `observed` is the deployment's state."""
    endpoint = KINDS[ENDPOINT].observe(cloud, member.endpoint)
    endpoint_status = "absent" if endpoint is None else endpoint.outputs["status"]
    return {
        "region": cloud.region,
        "status": observed.outputs.get("status", endpoint_status),
        "reason": next(
            (
                source.reason
                for source in (observed, endpoint)
                if source and source.reason and source.reason not in CHANGING_STATUSES
            ),
            "",
        ),
        "model": observed.tags.get("tsx:model"),
        "image": observed.tags.get("tsx:image-digest"),
        "endpoint": member.endpoint,
        "endpoint status": endpoint_status,
        "instances": next(
            (
                variant.get("CurrentInstanceCount")
                for variant in (endpoint.outputs["variants"] if endpoint else ())
            ),
            None,
        ),
    }
