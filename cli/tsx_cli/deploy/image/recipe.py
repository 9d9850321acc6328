"""The build files of a deployment's image: pure functions of the specification and this machine's versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import digest
from tsx_cli.deploy.preflight.limits import ACCELERATED, ARM
from tsx_cli.deploy.spec import Build, DeploySpec
from tsx_runtime.shared.suggestions import suggestion
from tsx_templates.render import locked_names, locked_requirements, render_tree

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UID = 10001  # of the server's user, by number, as Kubernetes wants to know that it is not root
COMPILERS = {"g++", "clang", "build-essential"}  # packages of Debian
UNLOCKED = "torchserve"  # the extra that has no package but tsx's own, which it names by its version
NO_EXTRAS = {"base", "sbom"}
STAGES: Mapping[str, str] = {"container": "server", "kubernetes": "server", "sagemaker": "sagemaker", "lambda": "lambda"}


class Local(NamedTuple):
    """The versions of this machine, which an image uses as well."""

    python: str  # such as 3.12
    torch: str
    version: str  # of tsx
    wheel: Path | None = None  # of tsx, where this version is none of the package index's
    wheel_sha: str = ""
    machine: str = ""  # such as linux/amd64
    base: str = ""  # with its digest, where one was found
    base_note: str = ""  # why it has none


class Recipe(NamedTuple):
    """The files of a build: texts, and files elsewhere, by their names in the build directory."""

    files: Mapping[str, str]
    copied: Mapping[str, Path]
    stage: str
    tag: str  # made of all of this and the machine that it is for, so that the same image has the same name
    machine: str  # such as linux/amd64
    notes: tuple[str, ...] = ()  # what a reader of the plan should know


def recipe(spec: DeploySpec, facts: Facts, local: Local) -> Recipe:
    stage = STAGES[spec.target] if not spec.kubernetes.kserve or spec.target != "kubernetes" else "bare"
    with_model = stage in ("server", "lambda")
    archive = f"model{_suffix(facts.archive)}" if with_model else ""
    copied = {archive: facts.archive} if with_model else {}
    if local.wheel is not None:
        copied[local.wheel.name] = local.wheel
    files = _rendered(spec, facts, local, archive, list(copied))
    runs_on = machine(spec) if spec.target in ("lambda", "sagemaker") else local.machine
    made_of = [files, stage, facts.sha256 if with_model else "", local.wheel_sha, runs_on]
    return Recipe(files, copied, stage, f"tsx-{digest(made_of, 12)}", runs_on, tuple(_notes(spec, facts, local)))


def base_image(build: Build, python: str) -> str:
    return build.base or f"python:{python}-slim"


def unpinned(requirements: str) -> list[str]:
    """The requirements that let pip choose a version."""
    lines = re.sub(r"\\\r?\n", " ", requirements).splitlines()
    wanted = [re.split(r"(?:^|\s)#|;|\s--", line)[0].strip() for line in lines if not line.lstrip().startswith("-")]
    return [each for each in wanted if each and not ("@" in each or ".whl" in each or ("==" in each and "*" not in each))]


def _adds_compiler(spec: DeploySpec, facts: Facts) -> bool:
    return bool(facts.compiles) and COMPILERS.isdisjoint(spec.build.packages)


def _notes(spec: DeploySpec, facts: Facts, local: Local) -> list[str]:
    notes = [local.base_note] if local.base_note else []
    if _adds_compiler(spec, facts):
        notes.append(f"the image gets g++ if its base has none, because {facts.compiles} compiles the model")
    if left := unpinned(facts.requirements):
        named = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        notes.append(
            f"the archive's requirements leave versions open: {named}. An image that is built later under the same name may have others; "
            "pin them with == (`uv pip compile --generate-hashes` pins what they need as well)"
        )
    return notes


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
    extras = sorted({*locked_names(), UNLOCKED} - NO_EXTRAS)
    if unknown := [extra for extra in own.extras if extra not in extras]:
        near = suggestion(unknown[0], extras) or "."
        raise UsageError(f"build.extras: tsx-serve has no extra '{unknown[0]}' for images{near} There are {', '.join(extras)}")
    files = {f"locked-{name}.txt": text for name, text in texts.items()}
    if facts.requirements:
        files["requirements.txt"] = facts.requirements
    values = {
        "base": local.base or base_image(own, local.python),
        "packages": own.packages,
        "compiles": _adds_compiler(spec, facts),
        "torch": own.torch or local.torch.partition("+")[0],
        "torch_index": index,
        "extras": f"[{','.join(own.extras)}]" if own.extras else "",
        "version": local.version,
        "wheel": local.wheel.name if local.wheel is not None else "",
        "installed": [*local.wheel.name.split("-"), local.version][1] if local.wheel is not None else "${TSX_VERSION}",
        "requirements": bool(facts.requirements),
        "hashed": "--hash" in facts.requirements,
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
