"""The files of `--emit`, as pure functions from the specification and the archive to texts by path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.container.resources import compose
from tsx_cli.deploy.emit.cloudformation import NEEDS_NOTE, template
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.image.recipe import Local, Recipe, recipe
from tsx_cli.deploy.kubernetes.resources import Manifest, kustomization, manifests
from tsx_cli.deploy.spec import DeploySpec

NAMES = {
    "Deployment": "deployment.yaml",
    "Service": "service.yaml",
    "HorizontalPodAutoscaler": "autoscaler.yaml",
    "PodDisruptionBudget": "disruption.yaml",
    "NetworkPolicy": "network-policy.yaml",
    "ServiceMonitor": "monitor.yaml",
    "ClusterServingRuntime": "serving-runtime.yaml",
    "InferenceService": "inference-service.yaml",
}


class EmittedFiles(NamedTuple):
    files: Mapping[str, str]
    copied: Mapping[str, Path]  # of these, the content lies elsewhere
    next_step: str


def _dockerfile(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    made = recipe(spec, facts, local)
    return EmittedFiles(made.files, made.copied, f"docker build --target {made.stage} --tag {spec.name}:{made.tag} .")


def _compose(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    labels = tags_of(spec, facts)
    if spec.image is not None:
        service = compose(spec, spec.image, stage=None, labels=labels)
        return EmittedFiles({"compose.yaml": _yaml([service])}, {}, "docker compose up --detach --wait")
    made = recipe(spec, facts, local)
    service = compose(spec, image_name(spec, made), stage=made.stage, labels=labels)
    return EmittedFiles({**made.files, "compose.yaml": _yaml([service])}, made.copied, "docker compose up --build --detach --wait")


def _kubernetes(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    made = None if spec.image is not None else recipe(spec, facts, local)
    image = spec.image or image_name(spec, made)
    files = {NAMES[each["kind"]]: _yaml([each]) for each in manifests(spec, image, tags_of(spec, facts))}
    cluster_wide = {NAMES["ClusterServingRuntime"]: files.pop(NAMES["ClusterServingRuntime"])} if spec.kubernetes.kserve else {}
    files["kustomization.yaml"] = _yaml([kustomization(spec, list(files))])
    step = "kubectl apply --server-side --kustomize ."
    if cluster_wide:
        step = f"kubectl apply --server-side --filename {NAMES['ClusterServingRuntime']}, once for the cluster, then {step}"
    if made is None:
        return EmittedFiles({**files, **cluster_wide}, {}, step)
    build = f"docker build --target {made.stage} --tag {image} . && docker push {image}"
    return EmittedFiles({**made.files, **files, **cluster_wide}, made.copied, f"{build}, then {step}")


def _cloudformation(spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    text = _yaml([template(spec, facts)])
    makes_role = spec.create_role or (spec.target == "lambda" and spec.canary is not None)
    roles = ", and --capabilities CAPABILITY_NAMED_IAM, because it creates a role" if makes_role else ""
    return EmittedFiles({"template.yaml": text}, {}, NEEDS_NOTE.format(name=spec.name) + roles)


Maker = Callable[[DeploySpec, Facts, Local], EmittedFiles]
KINDS: Mapping[str, tuple[tuple[str, ...], Maker]] = {  # the targets that it is for, the first where none is named, and what makes it
    "dockerfile": (("container", "sagemaker", "lambda", "kubernetes"), _dockerfile),
    "compose": (("container",), _compose),
    "cloudformation": (("sagemaker", "lambda"), _cloudformation),
    "kubernetes": (("kubernetes",), _kubernetes),
    "container": (("container",), _compose),  # the other targets' names
    "sagemaker": (("sagemaker",), _cloudformation),
    "lambda": (("lambda",), _cloudformation),
}


def check_kind(kind: str, target: str | None) -> str:
    """The target that it is for. Raises UsageError."""
    if kind not in KINDS:
        raise UsageError(f"--emit: there is no '{kind}'; there is {', '.join(KINDS)}")
    if target is not None and target not in KINDS[kind][0]:
        raise UsageError(f"--emit {kind} is for --target {' or '.join(KINDS[kind][0])}, not {target}")
    return target or KINDS[kind][0][0]


def emit(kind: str, spec: DeploySpec, facts: Facts, local: Local) -> EmittedFiles:
    return KINDS[kind][1](spec, facts, local)


def image_name(spec: DeploySpec, made: Recipe | None) -> str:
    assert made is not None
    return f"{spec.repository or spec.name}:{made.tag}"


class _Dumper(yaml.SafeDumper):
    """Lists are indented, and nothing is an alias of something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _yaml(documents: Iterable[Manifest]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
