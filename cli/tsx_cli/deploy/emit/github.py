"""A workflow of GitHub Actions for a deployment.

On a pull request, it checks the archive, compares its speed, and shows the plan. After the merge,
it deploys.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.cloudformation import render_template
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.plan import hide_secrets
from tsx_cli.deploy.image.recipe import Local, target_platform
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.spec import DeploySpec
from tsx_templates.render import render_tree

CHECK_TARGETS = {"sagemaker": "sagemaker", "lambda": "lambda", "kubernetes": "container"}
# Platform -> runner that builds images for it.
RUNNERS = {"linux/amd64": "ubuntu-latest", "linux/arm64": "ubuntu-24.04-arm"}
NEXT_STEP = (
    "commit .github, which belongs at the root of the repository."
    " Add in its settings: {access}; and the environment {environment}"
)
AWS_ACCESS = (
    "the variables AWS_PLAN_ROLE and AWS_DEPLOY_ROLE, roles that trust the repository"
    " (infra/iam/trust-github.json)"
)
CLUSTER_ACCESS = (
    "the secret KUBECONFIG, or the variables EKS_CLUSTER, AWS_REGION, AWS_PLAN_ROLE and"
    " AWS_DEPLOY_ROLE"
)

NO_SAMPLES = (
    "the archive has no samples: the workflow's check fails"
    " if no request is known for the handler; pack it with tsx archive --sample FILE"
)


def workflow(
    spec: DeploySpec, facts: Facts, local: Local, arguments: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Return the workflow by its path, and a text about the next step.

    Args:
        spec: The specification.
        facts: The facts of the archive.
        local: The versions of this machine.
        arguments: The options that the user gave, from `command_arguments`.

    Raises:
        UsageError: The deployment would fail.
    """
    _check(spec, facts)
    github, archive = spec.github, spec.model.as_posix()
    deployment_arguments = [
        "--name",
        spec.name,
        "--target",
        spec.target,
        *_location_arguments(arguments),
    ]
    builds_image = spec.image is None
    registry = (
        (spec.repository or "").partition("/")[0]
        if builds_image and spec.target == "kubernetes"
        else ""
    )
    values = {
        "name": spec.name,
        "target": spec.target,
        "contract": CHECK_TARGETS[spec.target],
        "archive": archive,
        "directory": spec.model.parent.as_posix(),
        "python": local.python,
        "tsx": f"tsx-serve=={local.version}",
        "region": spec.region or "${{ vars.AWS_REGION }}",
        "context": spec.kubernetes.context or "",
        "runner": (
            RUNNERS[target_platform(spec)]
            if builds_image and spec.target != "kubernetes"
            else RUNNERS["linux/amd64"]
        ),
        "registry": registry,
        "branch": github.branch,
        "environment": github.environment,
        "pack": github.pack,
        "slo": f" --slo {shlex.quote(github.slo)}" if github.slo else "",
        "fail_if": "".join(f" --fail-if {shlex.quote(condition)}" for condition in github.fail_if),
        "words": shlex.join([archive, *deployment_arguments, *arguments]),
        "which": shlex.join(deployment_arguments),
    }
    for key in ("archive", "directory", "context", "slo", "fail_if", "words", "which"):
        # GitHub must not evaluate an expression inside a value.
        values[key] = str(values[key]).replace("${{", "${{ '${{' }}")
    (text,) = render_tree("github", values, marks="[[ ]]").values()
    access = (
        AWS_ACCESS
        if spec.target != "kubernetes"
        else f"{CLUSTER_ACCESS}; for ECR, {AWS_ACCESS}"
        if ".dkr.ecr." in registry
        else CLUSTER_ACCESS
    )
    return {f".github/workflows/{spec.name}.yml": text}, NEXT_STEP.format(
        access=access, environment=github.environment
    )


def command_arguments(file: Path | None, options: Mapping[str, Any]) -> list[str]:
    """Return the options of a command line, without name, target, model and profile.

    Raises:
        UsageError: A value is secret, and must not be in a file of a repository.
    """
    arguments = [] if file is None else ["--file", file.as_posix()]
    canary = options.get("canary") or {}
    arguments += [argument for alarm in canary.get("alarms", ()) for argument in ("--alarm", alarm)]
    flag_values = {key: options.get(key) for key in ("region", "image", "role")} | {
        "canary": canary.get("percent"),
        "bake": canary.get("bake"),
    }
    arguments += [
        argument
        for key, value in flag_values.items()
        if value is not None
        for argument in (f"--{key}", str(value))
    ]
    arguments += ["--create-role"] if options.get("create_role") else []
    handled_keys = {"name", "target", "model", "profile", "create_role", "github", *flag_values}
    for key, value in options.items():
        if key not in handled_keys and value is not None:
            arguments += [
                argument
                for path, text in _flatten(key, value)
                for argument in ("--set", f"{path}={text}")
            ]
    return arguments


def _flatten(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flatten(f"{path}.{key}", item)]
    if hide_secrets(value, path.rpartition(".")[2]) != value:
        raise UsageError(
            f"{path} would be in a file of the repository: name a Secret with kubernetes.secrets,"
            " or add it on the platform"
        )
    return [(path, str(value))]


def _location_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that determine the location of the deployment."""
    location_keys = ("kubernetes.namespace=", "kubernetes.context=")
    pairs = [
        pair
        for pair in pairwise(arguments)
        if pair[0] in ("--file", "--region")
        or (pair[0] == "--set" and pair[1].startswith(location_keys))
    ]
    return [argument for pair in pairs for argument in pair]


def _check(spec: DeploySpec, facts: Facts) -> None:
    """Refuse a deployment that would fail.

    Raises:
        UsageError: The deployment would fail.
    """
    if spec.model.is_absolute() or ".." in spec.model.parts:
        raise UsageError(
            f"--emit github: {spec.model} is outside of the repository; give its path from there"
        )
    if spec.target != "kubernetes":
        render_template(spec, facts)
        return
    manifests(spec, "image", {})
    if spec.image is None and spec.repository is None:
        raise UsageError(
            "--emit github: neither image nor repository is given: --set repository=HOST/NAME is"
            " where the workflow pushes the image"
        )
