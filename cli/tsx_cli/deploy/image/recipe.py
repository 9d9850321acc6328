"""The build files of a deployment's image.

Pure functions derive them from the specification and the versions of this machine.
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
UID = 10001  # user id of the server; from the number, Kubernetes sees that it is not root
COMPILER_PACKAGES = {"g++", "clang", "build-essential"}  # Debian packages
# Extras without a lock file, because their packages depend on the version of tsx or torch.
UNLOCKED_EXTRAS = {"torchserve", "tensorrt"}
# The image of the last Neuron SDK that includes torch-neuronx.
NEURON_BASE = (
    "public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.31.0-ubuntu24.04"
)
NEURON_TORCH = "2.9"  # release of torch in that image
NON_EXTRA_LOCKS = {"base", "sbom"}  # lock files that belong to no extra
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
    version: str  # version of tsx
    wheel: Path | None = None  # wheel of tsx, if no package index has this version
    wheel_sha: str = ""
    machine: str = ""  # such as linux/amd64
    base: str = ""  # the base with its digest, if known
    base_note: str = ""  # why the digest is unknown


class Recipe(NamedTuple):
    """The files of a build, by their names in the build directory."""

    files: Mapping[str, str]
    copied: Mapping[str, Path]  # name -> existing file that is copied
    stage: str
    tag: str  # a hash of all files and the platform: the same image has the same name
    machine: str  # such as linux/amd64
    notes: tuple[str, ...] = ()  # notes for the user, shown below the plan


def recipe(spec: DeploySpec, facts: Facts, local: Local) -> Recipe:
    stage = (
        STAGES[spec.target] if not spec.kubernetes.kserve or spec.target != "kubernetes" else "bare"
    )
    contains_model = stage in ("server", "lambda")
    archive = f"model{_archive_suffix(facts.archive)}" if contains_model else ""
    copied = {archive: facts.archive} if contains_model else {}
    if local.wheel is not None:
        copied[local.wheel.name] = local.wheel
    machine = target_platform(spec) if spec.target in ("lambda", "sagemaker") else local.machine
    torch = (
        NEURON_TORCH
        if spec.device == NEURON
        else ".".join(re.split(r"[.+]", spec.build.torch or local.torch)[:2])
    )
    platform = ImagePlatform(spec.device, torch, machine)
    _check(spec, facts, platform)
    missing = set(_extras()) - set(spec.build.extras)
    added_extras = {
        extra: f"the form {name}"
        for extra, name in form_extras(facts.forms, platform, missing).items()
    }
    added_extras |= {extra: "the model" for extra in facts.extras if extra in missing}
    files = _render_files(
        spec, facts, local, archive, list(copied), [*spec.build.extras, *sorted(added_extras)]
    )
    hashed_parts = [files, stage, facts.sha256 if contains_model else "", local.wheel_sha, machine]
    return Recipe(
        files,
        copied,
        stage,
        f"tsx-{digest(hashed_parts, 12)}",
        machine,
        tuple(_notes(spec, facts, local, platform, added_extras)),
    )


def base_image(spec: DeploySpec, python: str) -> str:
    return spec.build.base or (NEURON_BASE if spec.device == NEURON else f"python:{python}-slim")


def _extras() -> list[str]:
    return sorted({*locked_names(), *UNLOCKED_EXTRAS} - NON_EXTRA_LOCKS)


def _check(spec: DeploySpec, facts: Facts, platform: ImagePlatform) -> None:
    if unknown := [extra for extra in spec.build.extras if extra not in _extras()]:
        hint = suggestion(unknown[0], _extras()) or "."
        raise UsageError(
            f"build.extras: tsx-serve has no extra '{unknown[0]}' for images{hint} There are"
            f" {', '.join(_extras())}"
        )
    if platform.device != NEURON:
        return
    if spec.build.torch or spec.build.torch_index:
        raise UsageError(
            "build.torch: an image for Neuron has the torch of its base, which torch-neuronx was"
            " built for. Set build.base"
        )
    reasons = {
        form.name: mismatch(form, platform) for form in facts.forms if device_of(form) == NEURON
    }
    if None not in reasons.values():
        explanation = (
            "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            or "it has no form neuron or neuron-bf16"
        )
        raise UsageError(
            f"{facts.archive} cannot use AWS's Neuron accelerators: {explanation}. Run tsx optimize"
            f" on an inf2 or trn1 instance with torch-neuronx {NEURON_TORCH}, or deploy to GPUs"
            " (ml.g…) or CPUs (ml.c…)"
        )


def unpinned_requirements(requirements: str) -> list[str]:
    """Return the requirements that let pip choose a version."""
    lines = re.sub(r"\\\r?\n", " ", requirements).splitlines()
    requirement_lines = [
        re.split(r"(?:^|\s)#|;|\s--", line)[0].strip()
        for line in lines
        if not line.lstrip().startswith("-")
    ]
    return [
        requirement
        for requirement in requirement_lines
        if requirement
        and not (
            "@" in requirement
            or ".whl" in requirement
            or ("==" in requirement and "*" not in requirement)
        )
    ]


def _adds_compiler(spec: DeploySpec, facts: Facts) -> bool:
    return bool(facts.compiling_part) and COMPILER_PACKAGES.isdisjoint(spec.build.packages)


def _notes(
    spec: DeploySpec,
    facts: Facts,
    local: Local,
    platform: ImagePlatform,
    added_extras: Mapping[str, str],
) -> list[str]:
    notes = [local.base_note] if local.base_note else []
    notes += [
        f"the image gets the extra {extra} of tsx-serve, which {source} needs"
        for extra, source in sorted(added_extras.items())
    ]
    notes += form_notes(facts.forms, platform)
    if platform.device == NEURON:
        notes.append(
            f"AWS's last torch-neuronx needs torch {NEURON_TORCH}, which is older than tsx asks for"
            " (2.10): its loading of weights has the vulnerability CVE-2026-24747, so deploy only"
            " archives from sources that you trust"
        )
    if _adds_compiler(spec, facts):
        notes.append(
            f"the image gets g++ if its base has none, because {facts.compiling_part} compiles the"
            " model"
        )
    if unpinned := unpinned_requirements(facts.requirements):
        examples = ", ".join(unpinned[:5]) + (
            f" and {len(unpinned) - 5} more" if len(unpinned) > 5 else ""
        )
        notes.append(
            f"the archive's requirements leave versions open: {examples}. An image that is built"
            " later under the same name may have others; pin them with == (`uv pip compile"
            " --generate-hashes` pins what they need as well)"
        )
    return notes


def tag_for_repository(repository: str | None, name: str, tag: str) -> str:
    """Return the tag of an image: `tsx-NAME-...` in a repository that deployments may share."""
    return tag if repository is None else f"tsx-{name}-{tag.removeprefix('tsx-')}"


def own_tag_pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a deployment's tags in a shared repository."""
    return re.compile(f"tsx-{re.escape(name)}-[0-9a-f]{{12}}")


def target_platform(spec: DeploySpec) -> str:
    """Return the platform of a deployment on AWS, such as linux/amd64."""
    arm = (
        spec.lambda_.architecture == "arm64"
        if spec.target == "lambda"
        else bool(ARM.match(spec.sagemaker.instance_type))
    )
    return "linux/arm64" if arm else "linux/amd64"


def _render_files(
    spec: DeploySpec,
    facts: Facts,
    local: Local,
    archive: str,
    copied: list[str],
    extras: Sequence[str],
) -> dict[str, str]:
    build = spec.build
    index = (
        build.torch_index
        if build.torch_index is not None
        else ""
        if spec.device == GPU
        else CPU_INDEX
    )
    installed = {"base", *extras}
    texts = locked_requirements(installed | ({"sbom", "lambda"} if archive else {"sbom"}))
    files = {f"locked-{name}.txt": text for name, text in texts.items()}
    if facts.requirements:
        files["requirements.txt"] = facts.requirements
    values = {
        "base": local.base or base_image(spec, local.python),
        "neuron": spec.device == NEURON,
        "packages": build.packages,
        "compiles": _adds_compiler(spec, facts),
        "torch": build.torch or local.torch.partition("+")[0],
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


def _archive_suffix(archive: Path) -> str:
    return next(
        (suffix for suffix in (".tar.gz", ".tgz") if archive.name.lower().endswith(suffix)), ".mar"
    )
