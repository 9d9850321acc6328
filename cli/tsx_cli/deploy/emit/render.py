"""The files of `--emit`: pure functions from a specification and an archive to texts by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.container.resources import compose
from tsx_cli.deploy.emit.cloudformation import DEPLOY_STEP, render_template
from tsx_cli.deploy.emit.github import workflow
from tsx_cli.deploy.emit.helm import chart
from tsx_cli.deploy.emit.kustomize import KUSTOMIZATION_HEADER, kustomize
from tsx_cli.deploy.emit.ray import NEXT_STEP, ray_files
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.engine.plan import hide_secrets
from tsx_cli.deploy.image.recipe import Local, Recipe, recipe
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.kubernetes.security import secret_step
from tsx_cli.deploy.spec import DeploySpec

FILE_NAMES = {
    "Deployment": "deployment.yaml",
    "Service": "service.yaml",
    "HorizontalPodAutoscaler": "autoscaler.yaml",
    "ScaledObject": "scaled-object.yaml",
    "PodDisruptionBudget": "disruption.yaml",
    "NetworkPolicy": "network-policy.yaml",
    "ServiceMonitor": "monitor.yaml",
    "HTTPRoute": "route.yaml",
    "ClusterServingRuntime": "serving-runtime.yaml",
    "InferenceService": "inference-service.yaml",
}


class EmittedFiles(NamedTuple):
    """The files to write, and a text about the next step."""

    files: Mapping[str, str]
    copied: Mapping[str, Path]  # path -> existing file that is copied to it
    next_step: str
    notes: Sequence[str] = ()


def _dockerfile(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    image_recipe = recipe(spec, facts, local)
    return EmittedFiles(
        image_recipe.files,
        image_recipe.copied,
        f"docker build --target {image_recipe.stage} --tag {spec.name}:{image_recipe.tag} .",
        image_recipe.notes,
    )


def _compose(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    image, image_recipe = _image(spec, facts, local)
    service = compose(
        spec, image, stage=image_recipe and image_recipe.stage, labels=tags_of(spec, facts)
    )
    files = {"compose.yaml": yaml_text([service])}
    if image_recipe is None:
        return EmittedFiles(files, {}, "docker compose up --detach --wait")
    return EmittedFiles(
        {**image_recipe.files, **files},
        image_recipe.copied,
        "docker compose up --build --detach --wait",
        image_recipe.notes,
    )


def _kubernetes(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    runtime = FILE_NAMES["ClusterServingRuntime"]

    def files(image: str) -> dict[str, str]:
        texts = {
            FILE_NAMES[manifest["kind"]]: yaml_text([manifest])
            for manifest in manifests(spec, image, tags_of(spec, facts))
        }
        names = [name for name in texts if name != runtime]
        return {
            **texts,
            "kustomization.yaml": yaml_text(
                [
                    {
                        **KUSTOMIZATION_HEADER,
                        "namespace": spec.kubernetes.namespace,
                        "resources": names,
                    }
                ]
            ),
        }

    step = f"{secret_step(spec)}kubectl apply --server-side --kustomize ."
    if spec.kubernetes.kserve:
        step = (
            f"kubectl apply --server-side --filename {runtime}, once for the cluster, then {step}"
        )
    return _files_with_image(spec, facts, local, files, step, "")


def _helm(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    step = f"helm upgrade --install {spec.name} . --namespace {spec.kubernetes.namespace} --wait"
    return _files_with_image(
        spec,
        facts,
        local,
        lambda image: chart(spec, facts, image, FILE_NAMES),
        f"{secret_step(spec)}{step}",
    )


def _kustomize(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    step = f"{secret_step(spec)}kubectl apply --server-side --kustomize overlays/production"
    return _files_with_image(
        spec,
        facts,
        local,
        lambda image: kustomize(spec, image, tags_of(spec, facts), FILE_NAMES),
        step,
    )


def _files_with_image(
    spec: DeploySpec,
    facts: Facts,
    local: Local,
    files: Callable[[str], dict[str, str]],
    step: str,
    prefix: str = "image/",
) -> EmittedFiles:
    """Return files for a cluster, and below `prefix` the build files of the image.

    Raises:
        UsageError: The specification has a canary.
    """
    if spec.canary is not None:
        raise UsageError(
            "canary: files cannot watch one; `tsx deploy --target kubernetes` does. Remove it"
        )
    image, image_recipe = _image(spec, facts, local)
    if image_recipe is None:
        return EmittedFiles(files(image), {}, step)
    build_files = {f"{prefix}{name}": text for name, text in image_recipe.files.items()}
    copied = {f"{prefix}{name}": path for name, path in image_recipe.copied.items()}
    build = (
        f"docker build --target {image_recipe.stage} --tag {image} {prefix.rstrip('/') or '.'} &&"
        f" docker push {image}"
    )
    return EmittedFiles(
        files(image) | build_files, copied, f"{build}, then {step}", image_recipe.notes
    )


def _cloudformation(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    text = yaml_text([render_template(spec, facts)])
    creates_role = spec.create_role or (spec.target == "lambda" and spec.canary is not None)
    roles = (
        ", and --capabilities CAPABILITY_NAMED_IAM, because it creates a role"
        if creates_role
        else ""
    )
    # The name of a stack begins with a letter.
    stack = spec.name if spec.name[0].isalpha() else f"tsx-{spec.name}"
    step = DEPLOY_STEP.format(name=stack) + roles
    if spec.image is None:
        files = f"tsx deploy {spec.model} --target {spec.target} --emit dockerfile"
        step = f"build the image, whose files `{files}` writes, and push it to ECR; then {step}"
    return EmittedFiles({"template.yaml": text}, {}, step)


def _ray(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    if spec.canary is not None:
        raise UsageError(
            "canary: the files are of one version; `tsx deploy --target ray` starts a canary."
            " Remove it"
        )
    files, notes = ray_files(spec, facts)
    return EmittedFiles(files, {}, NEXT_STEP, notes)


def _github(
    spec: DeploySpec, facts: Facts, local: Local, arguments: Sequence[str] = ()
) -> EmittedFiles:
    files, step = workflow(spec, facts, local, arguments)
    return EmittedFiles(files, {}, step)


FileMaker = Callable[[DeploySpec, Facts, Local], EmittedFiles]
# Kind -> targets (the first is the default) and the function that makes the files.
KINDS: Mapping[str, tuple[tuple[str, ...], FileMaker]] = {
    "dockerfile": (("container", "sagemaker", "lambda", "kubernetes"), _dockerfile),
    "compose": (("container",), _compose),
    "cloudformation": (("sagemaker", "lambda"), _cloudformation),
    "kubernetes": (("kubernetes",), _kubernetes),
    "helm": (("kubernetes",), _helm),
    "kustomize": (("kubernetes",), _kustomize),
    "github": (("sagemaker", "lambda", "kubernetes"), _github),
    "ray": (("ray",), _ray),
    "container": (("container",), _compose),  # From here on, the kinds are names of targets.
    "sagemaker": (("sagemaker",), _cloudformation),
    "lambda": (("lambda",), _cloudformation),
}


WITHOUT_IMAGE = ("cloudformation", "github", "ray", "sagemaker", "lambda")


def check_kind(kind: str, target: str | None) -> str:
    """Return the target of a kind.

    Raises:
        UsageError: There is no such kind, or it is for other targets.
    """
    if kind not in KINDS:
        raise UsageError(f"--emit: there is no '{kind}'; there is {', '.join(KINDS)}")
    if target is not None and target not in KINDS[kind][0]:
        raise UsageError(
            f"--emit {kind} is for --target {' or '.join(KINDS[kind][0])}, not {target}"
        )
    return target or KINDS[kind][0][0]


def emit(
    kind: str, spec: DeploySpec, facts: Facts, local: Local, arguments: Sequence[str] = ()
) -> EmittedFiles:
    """Return the files of a kind.

    `arguments` are the options of the command line, for files that run the command again.
    """
    emitted = (
        _github(spec, facts, local, arguments)
        if kind == "github"
        else KINDS[kind][1](spec, facts, local)
    )
    return emitted._replace(notes=[*emitted.notes, *_warnings(kind, spec)])


def _warnings(kind: str, spec: DeploySpec) -> list[str]:
    """Return warnings about unexpected effects of the files."""
    warnings, settings = [], spec.kubernetes
    secrets = [name for name, value in spec.env.items() if hide_secrets(value, name) != value]
    if secrets and kind not in ("dockerfile", "github"):
        advice = (
            "name a Secret with kubernetes.secrets instead"
            if spec.target == "kubernetes"
            else "do not commit them"
        )
        warnings.append(f"the files contain the value of {', '.join(secrets)} (env): {advice}")
    if (
        kind in ("kubernetes", "helm", "kustomize")
        and spec.image is None
        and spec.repository is None
    ):
        warnings.append(
            f"the image {spec.name} names no registry of yours: set repository=HOST/NAME, which the"
            " cluster can pull from, or --image"
        )
    if kind == "kustomize" and "/" in (settings.gateway or "") and not settings.hostnames:
        warnings.append(
            "the routes of both overlays take all hosts of the Gateway: set kubernetes.hostnames,"
            " or change one of them"
        )
    return warnings


def _image(spec: DeploySpec, facts: Facts, local: Local) -> tuple[str, Recipe | None]:
    """Return the name of the image, and its recipe if it has to be built."""
    if spec.image is not None:
        return spec.image, None
    image_recipe = recipe(spec, facts, local)
    return f"{spec.repository or spec.name}:{image_recipe.tag}", image_recipe
