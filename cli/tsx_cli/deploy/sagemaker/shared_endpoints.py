"""Endpoints that several deployments share, as inference components or as the models of a
multi-model endpoint.

The first deployment creates the endpoint, and the last one that is destroyed removes it. The tags
of a deployment's models say how it is served and on which endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.session import Cloud, own_bucket
from tsx_cli.deploy.engine.engine import OWNER
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.engine.plan import differences
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Observed, Resource, digest, numbered
from tsx_cli.deploy.sagemaker.deployment import names_of
from tsx_cli.deploy.sagemaker.kinds import CHANGING, KINDS
from tsx_cli.deploy.sagemaker.resources import prefix
from tsx_cli.deploy.spec import DeploySpec

# the tag of such an endpoint that tsx created, and of the models of its deployments: COMPONENTS or
# MODELS
SHARED = "tsx:shared"
PLACE = "tsx:endpoint"  # the tag of a deployment's models that names the endpoint
COMPONENTS, MODELS = "components", "models"
MODEL, CONFIG, ENDPOINT = (
    "AWS::SageMaker::Model",
    "AWS::SageMaker::EndpointConfig",
    "AWS::SageMaker::Endpoint",
)
OWN_VARIABLES = frozenset(
    {"TSX_TARGET", "TSX_SAGEMAKER_MODE", "TSX_DEFAULTS"}
)  # which tsx deploy sets itself


class EndpointMembership(NamedTuple):
    form: str
    endpoint: str

    def __str__(self) -> str:
        return (
            f"{'a component of' if self.form == COMPONENTS else 'a model of the multi-model'}"
            f" endpoint '{self.endpoint}'"
        )


def wanted_membership(spec: DeploySpec) -> EndpointMembership | None:
    """None for an endpoint with one model.

    Raises UsageError for what a shared endpoint does not have.
    """
    own = spec.sagemaker
    if own.component is not None and own.multi_model is not None:
        raise UsageError(
            "sagemaker.component and sagemaker.multi_model are two ways to share an endpoint:"
            " remove one of them"
        )
    found = own.component or own.multi_model
    if found is None:
        return None
    member = EndpointMembership(MODELS if own.component is None else COMPONENTS, found.endpoint)
    clashes = {
        "serverless": own.serverless,
        "asynchronous": own.asynchronous,
        "data_capture": own.data_capture,
    }
    fields = [f"sagemaker.{key}" for key, value in clashes.items() if value]
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
    """How a deployment shares an endpoint; None where it has one of its own, or where there is no
    such deployment.
    """
    tags = (each.tags for each in models_of(cloud, name).values())
    return next(
        (EndpointMembership(each[SHARED], each[PLACE]) for each in tags if SHARED in each), None
    )


def models_of(cloud: Cloud, name: str) -> dict[str, Observed]:
    """A deployment's models by their names."""
    found = {
        each: KINDS[MODEL].observe(cloud, each) for each in names_of(cloud, "model", prefix(name))
    }
    return {each: model for each, model in found.items() if model is not None}


def completed(cloud: Cloud, spec: DeploySpec) -> DeploySpec:
    """`spec` with the settings of the endpoint that is shared where it names none: a deployment
    changes only what it names.

    Raises CliError where the deployment is served in another way now, or the endpoint is not one
    that it can share; and UsageError.
    """
    member = wanted_membership(spec)
    there: object = membership(cloud, spec.name)
    if member is not None and there is None:
        own = KINDS[ENDPOINT].observe(cloud, spec.name)
        there = (
            "an endpoint of its own"
            if own is not None and own.tags.get(OWNER) == spec.name
            else None
        )
    if there is not None and there != member:
        asked = "an endpoint of its own" if member is None else member
        raise CliError(
            f"{spec.name} is {there} now, and the specification asks for {asked}. Its clients would"
            " have to follow: deploy it under another --name, and then destroy this one"
        )
    return spec if member is None else _with_settings(cloud, spec, member)


def _with_settings(cloud: Cloud, spec: DeploySpec, member: EndpointMembership) -> DeploySpec:
    own, component = spec.sagemaker, spec.sagemaker.component
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
    coming = endpoint.outputs["pending"]  # another deployment's change, which this one waits for
    config = KINDS[CONFIG].observe(cloud, coming or endpoint.properties["EndpointConfigName"])
    if config is None:
        raise CliError(
            f"the endpoint {member.endpoint} has no configuration any more: delete it, and deploy"
            " again"
        )
    variant = config.properties["ProductionVariants"][0]
    _check_endpoint(endpoint, variant, member, is_managed)
    others = other_components(cloud, member.endpoint, spec.name)
    if endpoint.state == "failed" and (not is_managed or others):
        on_it = (
            f". Destroy {', '.join(others)} on it first: it has to be created again"
            if others
            else ""
        )
        raise CliError(
            f"the endpoint {member.endpoint} is {endpoint.outputs['status']}:"
            f" {endpoint.reason}{on_it}"
        )
    if component is not None:
        scaling = variant.get("ManagedInstanceScaling", {})
        found = {
            "min_instances": scaling.get("MinInstanceCount"),
            "max_instances": scaling.get("MaxInstanceCount"),
        }
        found |= {} if is_managed else {"variant": variant["VariantName"]}
        component = component.model_copy(update=_unnamed(found, component.model_fields_set))
        own = own.model_copy(update={"component": component})
        return spec.model_copy(
            update={
                "sagemaker": own.model_copy(
                    update=_unnamed(_settings(config.properties), own.model_fields_set)
                )
            }
        )
    model = KINDS[MODEL].observe(cloud, variant["ModelName"])
    if model is None or own.multi_model is None:
        raise CliError(
            f"the endpoint {member.endpoint} has no model {variant['ModelName']} any more: delete"
            " it, and deploy again"
        )
    container = model.properties["PrimaryContainer"]
    bucket = container["ModelDataUrl"].removeprefix("s3://").partition("/")[0]
    if own.bucket not in (None, bucket):
        raise CliError(
            f"sagemaker.bucket is {own.bucket}, and the models of {member.endpoint} are in"
            f" {bucket}: remove sagemaker.bucket"
        )
    settings = _settings({**config.properties, **model.properties})
    settings["bucket"] = None if bucket == own_bucket(cloud.account, cloud.region) else bucket
    cache = {"cache": container.get("MultiModelConfig", {}).get("ModelCacheSetting") != "Disabled"}
    multi = own.multi_model.model_copy(update=_unnamed(cache, own.multi_model.model_fields_set))
    own = own.model_copy(update={"multi_model": multi, **_unnamed(settings, own.model_fields_set)})
    env = {
        key: value
        for key, value in container.get("Environment", {}).items()
        if key not in OWN_VARIABLES
    }
    return spec.model_copy(
        update={"sagemaker": own, "image": spec.image or container["Image"], "env": spec.env or env}
    )


def _check_endpoint(
    endpoint: Observed, variant: Mapping[str, Any], member: EndpointMembership, is_managed: bool
) -> None:
    """Raises CliError where the deployment cannot be on it."""
    if is_managed and endpoint.tags.get(SHARED) != member.form:
        way = (
            "; to use one of somebody else, set sagemaker.component.manage_endpoint=false"
            if member.form == COMPONENTS
            else ""
        )
        raise CliError(
            f"the endpoint {member.endpoint} already exists, and tsx deploy did not create it for"
            f" several {member.form}: give another name{way}"
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
    found = cloud.listed(
        "sagemaker",
        "list_inference_components",
        "InferenceComponents",
        doing,
        EndpointNameEquals=endpoint,
    )
    return sorted(
        each["InferenceComponentName"] for each in found if each["InferenceComponentName"] != name
    )


def _settings(properties: Mapping[str, Any]) -> dict[str, Any]:
    """An endpoint's settings, by their keys under `sagemaker`. None where it has none."""
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


def _unnamed(settings: Mapping[str, Any], named: set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None and key not in named}


def member_tags(spec: DeploySpec, facts: Facts, member: EndpointMembership) -> dict[str, str]:
    """Without what changes with the endpoint, and so with other deployments."""
    left = {"tsx:spec-sha"} | ({"tsx:image-digest"} if member.form == MODELS else set())
    tags = {key: value for key, value in tags_of(spec, facts).items() if key not in left}
    return {**tags, SHARED: member.form, PLACE: member.endpoint}


def endpoint_tags(member: EndpointMembership) -> dict[str, str]:
    """It belongs to no single deployment, so there is no tsx:name."""
    return {"tsx:target": "sagemaker", SHARED: member.form}


def endpoint_prefix(endpoint: str) -> str:
    """Of its configurations and models.

    The names of deployments have no two hyphens together: none is taken for a deployment's.
    """
    return f"tsx-{endpoint}--"


def endpoint_resources(
    member: EndpointMembership,
    config: Mapping[str, Any],
    update: Mapping[str, Any],
    needs: tuple[str, ...],
) -> list[Resource]:
    """`update`: how it moves to another configuration."""
    tags = endpoint_tags(member)
    made = Resource(
        "EndpointConfig",
        CONFIG,
        endpoint_prefix(member.endpoint) + digest(config),
        config,
        needs,
        tags,
    )
    return [
        made,
        Resource(
            "Endpoint",
            ENDPOINT,
            member.endpoint,
            {"EndpointConfigName": made.name, **update},
            ("EndpointConfig",),
            tags,
        ),
    ]


def noted(cloud: Cloud, member: EndpointMembership, made: list[Resource]) -> list[Resource]:
    """With a note of what changes for the other deployments on the endpoint."""
    endpoint = KINDS[ENDPOINT].observe(cloud, member.endpoint)
    config = next((each for each in made if each.id == "EndpointConfig"), None)
    before = (
        None
        if endpoint is None
        else KINDS[CONFIG].observe(cloud, endpoint.properties["EndpointConfigName"])
    )
    if config is None or before is None or before.name == config.name:
        return made
    old, new = (
        before.properties["ProductionVariants"][0],
        config.properties["ProductionVariants"][0],
    )
    changes = ", ".join(
        f"{each.path} {each.old} -> {each.new}" for each in differences(old, new, {}, set())
    )
    note = (
        f"the endpoint {member.endpoint} changes for all {member.form} on it:"
        f" {changes or 'its role, network or key'}"
    )
    return [replace(each, notes=(*each.notes, note)) if each is config else each for each in made]


def endpoint_belongings(
    cloud: Cloud, member: EndpointMembership, models: Sequence[Resource], *, is_last: bool
) -> list[Resource]:
    """The endpoint and what was created for it, where nothing else is on it; nothing where tsx did
    not create it.

    The deployment's own models go after all of it: they say which endpoint it is.
    """
    endpoint = KINDS[ENDPOINT].observe(cloud, member.endpoint)
    if not is_last or (endpoint is not None and endpoint.tags.get(SHARED) != member.form):
        return []
    needs = tuple(each.id for each in models)
    found = former(cloud, member, (), needs)
    after = tuple(each.id for each in found)
    return [
        *found,
        *(
            []
            if endpoint is None
            else [Resource("Endpoint", ENDPOINT, member.endpoint, {}, (*needs, *after))]
        ),
    ]


def former(
    cloud: Cloud, member: EndpointMembership, kept: Sequence[str], needs: tuple[str, ...] = ()
) -> list[Resource]:
    """Models and configurations of the endpoint itself, without `kept`."""
    beginning = endpoint_prefix(member.endpoint)
    names = [each for each in names_of(cloud, "model", beginning) if each not in kept]
    models = numbered("EndpointModel", MODEL, names, needs)
    after = (*needs, *(each.id for each in models))
    names = [each for each in names_of(cloud, "endpoint_config", beginning) if each not in kept]
    return [*models, *numbered("EndpointConfig", CONFIG, names, after)]


def versions_of(models: Mapping[str, Observed], current: str | None) -> list[DeployedVersion]:
    """The oldest first."""
    found = sorted(models.items(), key=lambda each: (each[1].outputs["made"], each[0]))
    return [
        DeployedVersion(number, name, model.outputs["made"], model.tags, name == current)
        for number, (name, model) in enumerate(found, start=1)
    ]


def superseded(versions: Sequence[DeployedVersion], keep: int, names: set[str]) -> list[str]:
    """The models of the versions beyond the newest `keep`; those that are wanted are among
    `names`.
    """
    others = [each.id for each in versions if each.id not in names]
    return others[: -(keep - 1) or None]


def common_status(
    cloud: Cloud, name: str, found: Observed, member: EndpointMembership
) -> dict[str, Any]:
    """The beginning of what `tsx deploy status` shows; `found` has the state of the deployment."""
    endpoint = KINDS[ENDPOINT].observe(cloud, member.endpoint)
    there = "absent" if endpoint is None else endpoint.outputs["status"]
    return {
        "name": name,
        "target": "sagemaker",
        "region": cloud.region,
        "status": found.outputs.get("status", there),
        "reason": next(
            (
                each.reason
                for each in (found, endpoint)
                if each and each.reason and each.reason not in CHANGING
            ),
            "",
        ),
        "model": found.tags.get("tsx:model"),
        "image": found.tags.get("tsx:image-digest"),
        "endpoint": member.endpoint,
        "endpoint status": there,
        "instances": next(
            (
                each.get("CurrentInstanceCount")
                for each in (endpoint.outputs["variants"] if endpoint else ())
            ),
            None,
        ),
    }
