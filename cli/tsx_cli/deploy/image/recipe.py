"""The build files of a deployment's image: pure functions of the specification and this machine's versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import digest
from tsx_cli.deploy.preflight.limits import ACCELERATED, ARM
from tsx_cli.deploy.spec import DeploySpec
from tsx_templates.render import locked_requirements, render_tree

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UID = 10001  # of the server's user, by number, as Kubernetes wants to know that it is not root
STAGES: Mapping[str, str] = {"container": "server", "kubernetes": "server", "sagemaker": "sagemaker", "lambda": "lambda"}


class Local(NamedTuple):
    """The versions of this machine, which an image uses as well."""

    python: str  # such as 3.12
    torch: str
    version: str  # of tsx
    wheel: Path | None = None  # of tsx, where this version is none of the package index's
    wheel_sha: str = ""


class Recipe(NamedTuple):
    """The files of a build: texts, and files elsewhere, by their names in the build directory."""

    files: Mapping[str, str]
    copied: Mapping[str, Path]
    stage: str
    tag: str  # made of all of this, so that the same image has the same name


def recipe(spec: DeploySpec, facts: Facts, local: Local) -> Recipe:
    stage = STAGES[spec.target] if not spec.kubernetes.kserve or spec.target != "kubernetes" else "bare"
    with_model = stage in ("server", "lambda")
    archive = f"model{_suffix(facts.archive)}" if with_model else ""
    copied = {archive: facts.archive} if with_model else {}
    if local.wheel is not None:
        copied[local.wheel.name] = local.wheel
    files = _rendered(spec, facts, local, archive, list(copied))
    made_of = [files, stage, facts.sha256 if with_model else "", local.wheel_sha]
    return Recipe(files, copied, stage, f"tsx-{digest(made_of, 12)}")


def tag_in(repository: str | None, name: str, tag: str) -> str:
    """In a repository that several deployments may share, a tag says whose image it is: `tsx-NAME-...`."""
    return tag if repository is None else f"tsx-{name}-{tag.removeprefix('tsx-')}"


def own_tag(name: str) -> re.Pattern[str]:
    """Of a deployment's images in such a repository."""
    return re.compile(f"tsx-{re.escape(name)}-[0-9a-f]{{12}}")


def wants_gpu(spec: DeploySpec) -> bool:
    """Whether torch has to come with CUDA."""
    if spec.target == "sagemaker":
        return spec.sagemaker.serverless is None and bool(ACCELERATED.match(spec.sagemaker.instance_type))
    if spec.target == "lambda":
        return spec.lambda_.managed_instances is not None and spec.lambda_.managed_instances.gpu_memory is not None
    return {"container": spec.container.gpus, "kubernetes": spec.kubernetes.gpus}.get(spec.target, 0) > 0


def machine(spec: DeploySpec) -> str:
    """Of AWS: what this machine is does not matter there."""
    arm = spec.lambda_.architecture == "arm64" if spec.target == "lambda" else bool(ARM.match(spec.sagemaker.instance_type))
    return "linux/arm64" if arm else "linux/amd64"


def _rendered(spec: DeploySpec, facts: Facts, local: Local, archive: str, copied: list[str]) -> dict[str, str]:
    own = spec.build
    index = own.torch_index if own.torch_index is not None else "" if wants_gpu(spec) else CPU_INDEX
    installed = {"base", *own.extras}
    texts = locked_requirements(installed | ({"sbom", "lambda"} if archive else {"sbom"}))
    files = {f"locked-{name}.txt": text for name, text in texts.items()}
    if facts.requirements:
        files["requirements.txt"] = facts.requirements
    values = {
        "base": own.base or f"python:{local.python}-slim",
        "packages": own.packages,
        "torch": own.torch or local.torch.partition("+")[0],
        "torch_index": index,
        "extras": f"[{','.join(own.extras)}]" if own.extras else "",
        "version": local.version,
        "wheel": local.wheel.name if local.wheel is not None else "",
        "requirements": bool(facts.requirements),
        "archive": archive,
        "model": f"{facts.model_name}/{facts.model_version}",
        "sha256": facts.sha256,
        "uid": UID,
        "locks": [f"locked-{name}.txt" for name in texts if name in installed],
        "copied": sorted([*copied, *files]),
    }
    return {str(path): text for path, text in render_tree("deploy", values).items()} | files


def _suffix(archive: Path) -> str:
    return next((suffix for suffix in (".tar.gz", ".tgz") if archive.name.lower().endswith(suffix)), ".mar")
