"""The build files of a deployment's image: pure functions of the specification and this machine's
versions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.kept_forms import (
    ImagePlatform,
    device_of,
    form_extras,
    form_notes,
    mismatch,
)
from tsx_cli.deploy.engine.resources import digest
from tsx_cli.deploy.preflight.limits import ARM
from tsx_cli.deploy.spec import GPU, NEURON, DeploySpec
from tsx_runtime.shared.suggestions import suggestion
from tsx_templates.render import locked_names, locked_requirements, render_tree

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UID = 10001  # of the server's user, by number, as Kubernetes wants to know that it is not root
COMPILERS = {"g++", "clang", "build-essential"}  # packages of Debian
UNLOCKED = {"torchserve", "tensorrt"}  # extras whose packages follow from tsx's or torch's version
# the last SDK with torch-neuronx
NEURON_BASE = (
    "public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.31.0-ubuntu24.04"
)
NEURON_TORCH = "2.9"  # in that base
NO_EXTRAS = {"base", "sbom"}
STAGES: Mapping[str, str] = {
    "container": "server",
    "kubernetes": "server",
    "sagemaker": "sagemaker",
    "lambda": "lambda",
}


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
    # made of all of this and the machine that it is for, so that the same image has the same name
    tag: str
    machine: str  # such as linux/amd64
    notes: tuple[str, ...] = ()  # what a reader of the plan should know


def recipe(spec: DeploySpec, facts: Facts, local: Local) -> Recipe:
    stage = (
        STAGES[spec.target] if not spec.kubernetes.kserve or spec.target != "kubernetes" else "bare"
    )
    with_model = stage in ("server", "lambda")
    archive = f"model{_suffix(facts.archive)}" if with_model else ""
    copied = {archive: facts.archive} if with_model else {}
    if local.wheel is not None:
        copied[local.wheel.name] = local.wheel
    runs_on = machine(spec) if spec.target in ("lambda", "sagemaker") else local.machine
    torch = (
        NEURON_TORCH
        if spec.device == NEURON
        else ".".join(re.split(r"[.+]", spec.build.torch or local.torch)[:2])
    )
    place = ImagePlatform(spec.device, torch, runs_on)
    _check(spec, facts, place)
    missing = set(_extras()) - set(spec.build.extras)
    added = {
        extra: f"the form {name}"
        for extra, name in form_extras(facts.forms, place, missing).items()
    }
    added |= {extra: "the model" for extra in facts.extras if extra in missing}
    files = _rendered(
        spec, facts, local, archive, list(copied), [*spec.build.extras, *sorted(added)]
    )
    made_of = [files, stage, facts.sha256 if with_model else "", local.wheel_sha, runs_on]
    return Recipe(
        files,
        copied,
        stage,
        f"tsx-{digest(made_of, 12)}",
        runs_on,
        tuple(_notes(spec, facts, local, place, added)),
    )


def base_image(spec: DeploySpec, python: str) -> str:
    return spec.build.base or (NEURON_BASE if spec.device == NEURON else f"python:{python}-slim")


def _extras() -> list[str]:
    return sorted({*locked_names(), *UNLOCKED} - NO_EXTRAS)


def _check(spec: DeploySpec, facts: Facts, place: ImagePlatform) -> None:
    if unknown := [extra for extra in spec.build.extras if extra not in _extras()]:
        near = suggestion(unknown[0], _extras()) or "."
        raise UsageError(
            f"build.extras: tsx-serve has no extra '{unknown[0]}' for images{near} There are"
            f" {', '.join(_extras())}"
        )
    if place.device != NEURON:
        return
    if spec.build.torch or spec.build.torch_index:
        raise UsageError(
            "build.torch: an image for Neuron has the torch of its base, which torch-neuronx was"
            " built for. Set build.base"
        )
    reasons = {
        form.name: mismatch(form, place) for form in facts.forms if device_of(form) == NEURON
    }
    if None not in reasons.values():
        why = (
            "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            or "it has no form neuron or neuron-bf16"
        )
        raise UsageError(
            f"{facts.archive} cannot use AWS's Neuron accelerators: {why}. Run tsx optimize on an"
            f" inf2 or trn1 instance with torch-neuronx {NEURON_TORCH}, or deploy to GPUs (ml.g…)"
            " or CPUs (ml.c…)"
        )


def unpinned(requirements: str) -> list[str]:
    """The requirements that let pip choose a version."""
    lines = re.sub(r"\\\r?\n", " ", requirements).splitlines()
    wanted = [
        re.split(r"(?:^|\s)#|;|\s--", line)[0].strip()
        for line in lines
        if not line.lstrip().startswith("-")
    ]
    return [
        each
        for each in wanted
        if each and not ("@" in each or ".whl" in each or ("==" in each and "*" not in each))
    ]


def _adds_compiler(spec: DeploySpec, facts: Facts) -> bool:
    return bool(facts.compiles) and COMPILERS.isdisjoint(spec.build.packages)


def _notes(
    spec: DeploySpec, facts: Facts, local: Local, place: ImagePlatform, added: Mapping[str, str]
) -> list[str]:
    notes = [local.base_note] if local.base_note else []
    notes += [
        f"the image gets the extra {extra} of tsx-serve, which {what} needs"
        for extra, what in sorted(added.items())
    ]
    notes += form_notes(facts.forms, place)
    if place.device == NEURON:
        notes.append(
            f"AWS's last torch-neuronx needs torch {NEURON_TORCH}, which is older than tsx asks for"
            " (2.10): its loading of weights has the vulnerability CVE-2026-24747, so deploy only"
            " archives from sources that you trust"
        )
    if _adds_compiler(spec, facts):
        notes.append(
            f"the image gets g++ if its base has none, because {facts.compiles} compiles the model"
        )
    if left := unpinned(facts.requirements):
        named = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        notes.append(
            f"the archive's requirements leave versions open: {named}. An image that is built later"
            " under the same name may have others; pin them with == (`uv pip compile"
            " --generate-hashes` pins what they need as well)"
        )
    return notes


def tag_in(repository: str | None, name: str, tag: str) -> str:
    """In a repository that several deployments may share, a tag says whose image it is:
    `tsx-NAME-...`.
    """
    return tag if repository is None else f"tsx-{name}-{tag.removeprefix('tsx-')}"


def own_tag(name: str) -> re.Pattern[str]:
    """Of a deployment's images in such a repository."""
    return re.compile(f"tsx-{re.escape(name)}-[0-9a-f]{{12}}")


def machine(spec: DeploySpec) -> str:
    """Of AWS: what this machine is does not matter there."""
    arm = (
        spec.lambda_.architecture == "arm64"
        if spec.target == "lambda"
        else bool(ARM.match(spec.sagemaker.instance_type))
    )
    return "linux/arm64" if arm else "linux/amd64"


def _rendered(
    spec: DeploySpec,
    facts: Facts,
    local: Local,
    archive: str,
    copied: list[str],
    extras: Sequence[str],
) -> dict[str, str]:
    own = spec.build
    index = (
        own.torch_index if own.torch_index is not None else "" if spec.device == GPU else CPU_INDEX
    )
    installed = {"base", *extras}
    texts = locked_requirements(installed | {"sbom"})
    files = {f"locked-{name}.txt": text for name, text in texts.items()}
    if facts.requirements:
        files["requirements.txt"] = facts.requirements
    values = {
        "base": local.base or base_image(spec, local.python),
        "neuron": spec.device == NEURON,
        "packages": own.packages,
        "compiles": _adds_compiler(spec, facts),
        "torch": own.torch or local.torch.partition("+")[0],
        "torch_index": index,
        "extras": f"[{','.join(extras)}]" if extras else "",
        "version": local.version,
        "wheel": local.wheel.name if local.wheel is not None else "",
        "installed": (
            [*local.wheel.name.split("-"), local.version][1]
            if local.wheel is not None
            else "${TSX_VERSION}"
        ),
        "requirements": bool(facts.requirements),
        "hashed": "--hash" in facts.requirements,
        "archive": archive,
        "model": re.sub(r'(["$\\])', r"\\\1", f"{facts.model_name}/{facts.model_version}"),
        "sha256": facts.sha256,
        "uid": UID,
        "locks": [f"locked-{name}.txt" for name in texts if name in installed],
        "copied": sorted([*copied, *files]),
    }
    return {str(path): text for path, text in render_tree("deploy", values).items()} | files


def _suffix(archive: Path) -> str:
    return next(
        (suffix for suffix in (".tar.gz", ".tgz") if archive.name.lower().endswith(suffix)), ".mar"
    )
