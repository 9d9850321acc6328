"""The files of `--emit`, as pure functions from the specification and the archive to texts by
path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.container.resources import compose
from tsx_cli.deploy.emit.cloudformation import NEEDS_NOTE, template
from tsx_cli.deploy.emit.github import workflow
from tsx_cli.deploy.emit.helm import chart
from tsx_cli.deploy.emit.kustomize import HEAD, kustomize
from tsx_cli.deploy.emit.ray import STEP, ray_files
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.engine.plan import hidden
from tsx_cli.deploy.image.recipe import Local, Recipe, recipe
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.kubernetes.security import secret_step
from tsx_cli.deploy.spec import DeploySpec

NAMES = {
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
    files: Mapping[str, str]
    copied: Mapping[str, Path]  # of these, the content lies elsewhere
    next_step: str
    notes: Sequence[str] = ()


def _dockerfile(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    made = recipe(spec, facts, local)
    return EmittedFiles(
        made.files,
        made.copied,
        f"docker build --target {made.stage} --tag {spec.name}:{made.tag} .",
        made.notes,
    )


def _compose(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    image, made = _image(spec, facts, local)
    service = compose(spec, image, stage=made and made.stage, labels=tags_of(spec, facts))
    files = {"compose.yaml": yaml_text([service])}
    if made is None:
        return EmittedFiles(files, {}, "docker compose up --detach --wait")
    return EmittedFiles(
        {**made.files, **files},
        made.copied,
        "docker compose up --build --detach --wait",
        made.notes,
    )


def _kubernetes(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    runtime = NAMES["ClusterServingRuntime"]

    def files(image: str) -> dict[str, str]:
        made = {
            NAMES[each["kind"]]: yaml_text([each])
            for each in manifests(spec, image, tags_of(spec, facts))
        }
        names = [name for name in made if name != runtime]
        return {
            **made,
            "kustomization.yaml": yaml_text(
                [{**HEAD, "namespace": spec.kubernetes.namespace, "resources": names}]
            ),
        }

    step = f"{secret_step(spec)}kubectl apply --server-side --kustomize ."
    if spec.kubernetes.kserve:
        step = (
            f"kubectl apply --server-side --filename {runtime}, once for the cluster, then {step}"
        )
    return _beside_image(spec, facts, local, files, step, "")


def _helm(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    step = f"helm upgrade --install {spec.name} . --namespace {spec.kubernetes.namespace} --wait"
    return _beside_image(
        spec,
        facts,
        local,
        lambda image: chart(spec, facts, image, NAMES),
        f"{secret_step(spec)}{step}",
    )


def _kustomize(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    step = f"{secret_step(spec)}kubectl apply --server-side --kustomize overlays/production"
    return _beside_image(
        spec, facts, local, lambda image: kustomize(spec, image, tags_of(spec, facts), NAMES), step
    )


def _beside_image(
    spec: DeploySpec,
    facts: Facts,
    local: Local,
    files: Callable[[str], dict[str, str]],
    step: str,
    place: str = "image/",
) -> EmittedFiles:
    """The files of an image that is to be built lie at `place`: a directory of their own where all
    others are read for the cluster.
    """
    if spec.canary is not None:
        raise UsageError(
            "canary: files cannot watch one; `tsx deploy --target kubernetes` does. Remove it"
        )
    image, made = _image(spec, facts, local)
    if made is None:
        return EmittedFiles(files(image), {}, step)
    built = {f"{place}{name}": text for name, text in made.files.items()}
    copied = {f"{place}{name}": path for name, path in made.copied.items()}
    build = (
        f"docker build --target {made.stage} --tag {image} {place.rstrip('/') or '.'} && docker"
        f" push {image}"
    )
    return EmittedFiles(files(image) | built, copied, f"{build}, then {step}", made.notes)


def _cloudformation(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    text = yaml_text([template(spec, facts)])
    makes_role = spec.create_role or (spec.target == "lambda" and spec.canary is not None)
    roles = (
        ", and --capabilities CAPABILITY_NAMED_IAM, because it creates a role" if makes_role else ""
    )
    stack = (
        spec.name if spec.name[0].isalpha() else f"tsx-{spec.name}"
    )  # the name of a stack begins with a letter
    step = NEEDS_NOTE.format(name=stack) + roles
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
    return EmittedFiles(files, {}, STEP, notes)


def _github(
    spec: DeploySpec, facts: Facts, local: Local, words: Sequence[str] = ()
) -> EmittedFiles:
    files, step = workflow(spec, facts, local, words)
    return EmittedFiles(files, {}, step)


Maker = Callable[[DeploySpec, Facts, Local], EmittedFiles]
KINDS: Mapping[
    str, tuple[tuple[str, ...], Maker]
] = {  # the targets that it is for, the first where none is named, and what makes it
    "dockerfile": (("container", "sagemaker", "lambda", "kubernetes"), _dockerfile),
    "compose": (("container",), _compose),
    "cloudformation": (("sagemaker", "lambda"), _cloudformation),
    "kubernetes": (("kubernetes",), _kubernetes),
    "helm": (("kubernetes",), _helm),
    "kustomize": (("kubernetes",), _kustomize),
    "github": (("sagemaker", "lambda", "kubernetes"), _github),
    "ray": (("ray",), _ray),
    "container": (("container",), _compose),  # the other targets' names
    "sagemaker": (("sagemaker",), _cloudformation),
    "lambda": (("lambda",), _cloudformation),
}


WITHOUT_IMAGE = ("cloudformation", "github", "ray", "sagemaker", "lambda")


def check_kind(kind: str, target: str | None) -> str:
    """The target that it is for. Raises UsageError."""
    if kind not in KINDS:
        raise UsageError(f"--emit: there is no '{kind}'; there is {', '.join(KINDS)}")
    if target is not None and target not in KINDS[kind][0]:
        raise UsageError(
            f"--emit {kind} is for --target {' or '.join(KINDS[kind][0])}, not {target}"
        )
    return target or KINDS[kind][0][0]


def emit(
    kind: str, spec: DeploySpec, facts: Facts, local: Local, words: Sequence[str] = ()
) -> EmittedFiles:
    """`words` are the options that were given beside the file of settings, for files that run the
    command again.
    """
    made = (
        _github(spec, facts, local, words)
        if kind == "github"
        else KINDS[kind][1](spec, facts, local)
    )
    return made._replace(notes=[*made.notes, *_warnings(kind, spec)])


def _warnings(kind: str, spec: DeploySpec) -> list[str]:
    """Warnings about what the files would do unexpectedly."""
    found, own = [], spec.kubernetes
    secrets = [name for name, value in spec.env.items() if hidden(value, name) != value]
    if secrets and kind not in ("dockerfile", "github"):
        instead = (
            "name a Secret with kubernetes.secrets instead"
            if spec.target == "kubernetes"
            else "do not commit them"
        )
        found.append(f"the files contain the value of {', '.join(secrets)} (env): {instead}")
    if (
        kind in ("kubernetes", "helm", "kustomize")
        and spec.image is None
        and spec.repository is None
    ):
        found.append(
            f"the image {spec.name} names no registry of yours: set repository=HOST/NAME, which the"
            " cluster can pull from, or --image"
        )
    if kind == "kustomize" and "/" in (own.gateway or "") and not own.hostnames:
        found.append(
            "the routes of both overlays take all hosts of the Gateway: set kubernetes.hostnames,"
            " or change one of them"
        )
    return found


def _image(spec: DeploySpec, facts: Facts, local: Local) -> tuple[str, Recipe | None]:
    """Return the name of the image, and how it is built where none is named."""
    if spec.image is not None:
        return spec.image, None
    made = recipe(spec, facts, local)
    return f"{spec.repository or spec.name}:{made.tag}", made
