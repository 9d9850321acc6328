"""A workflow of GitHub Actions that checks an archive, compares its speed, shows the plan on a pull
request, and deploys what is merged.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.cloudformation import template
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.plan import hidden
from tsx_cli.deploy.image.recipe import Local, machine
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.spec import DeploySpec
from tsx_templates.render import render_tree

CONTRACTS = {"sagemaker": "sagemaker", "lambda": "lambda", "kubernetes": "container"}
RUNNERS = {
    "linux/amd64": "ubuntu-latest",
    "linux/arm64": "ubuntu-24.04-arm",
}  # an image is built on a machine of its own kind
NEXT = """commit .github, which belongs at the root of the repository. Add in its settings: {access}; and the environment {environment}"""
AWS = (
    "the variables AWS_PLAN_ROLE and AWS_DEPLOY_ROLE, roles that trust the repository"
    " (infra/iam/trust-github.json)"
)
CLUSTER = (
    "the secret KUBECONFIG, or the variables EKS_CLUSTER, AWS_REGION, AWS_PLAN_ROLE and"
    " AWS_DEPLOY_ROLE"
)

NO_SAMPLES = """the archive has no samples: the workflow's check fails if no request is known for the handler; \
pack it with tsx archive --sample FILE"""


def workflow(
    spec: DeploySpec, facts: Facts, local: Local, words: Sequence[str]
) -> tuple[dict[str, str], str]:
    """The file by its path, and what is to be done next.

    `words` are the options that the user gave. Raises UsageError.
    """
    _check(spec, facts)
    own, archive = spec.github, spec.model.as_posix()
    which = ["--name", spec.name, "--target", spec.target, *_place(words)]
    built = spec.image is None
    registry = (
        (spec.repository or "").partition("/")[0] if built and spec.target == "kubernetes" else ""
    )
    values = {
        "name": spec.name,
        "target": spec.target,
        "contract": CONTRACTS[spec.target],
        "archive": archive,
        "directory": spec.model.parent.as_posix(),
        "python": local.python,
        "tsx": f"tsx-serve=={local.version}",
        "region": spec.region or "${{ vars.AWS_REGION }}",
        "context": spec.kubernetes.context or "",
        "runner": (
            RUNNERS[machine(spec)]
            if built and spec.target != "kubernetes"
            else RUNNERS["linux/amd64"]
        ),
        "registry": registry,
        "branch": own.branch,
        "environment": own.environment,
        "pack": own.pack,
        "slo": f" --slo {shlex.quote(own.slo)}" if own.slo else "",
        "fail_if": "".join(f" --fail-if {shlex.quote(each)}" for each in own.fail_if),
        "words": shlex.join([archive, *which, *words]),
        "which": shlex.join(which),
    }
    for key in ("archive", "directory", "context", "slo", "fail_if", "words", "which"):
        values[key] = str(values[key]).replace("${{", "${{ '${{' }}")  # GitHub evaluates no value
    (text,) = render_tree("github", values, marks="[[ ]]").values()
    access = (
        AWS
        if spec.target != "kubernetes"
        else f"{CLUSTER}; for ECR, {AWS}"
        if ".dkr.ecr." in registry
        else CLUSTER
    )
    return {f".github/workflows/{spec.name}.yml": text}, NEXT.format(
        access=access, environment=own.environment
    )


def command_words(file: Path | None, given: Mapping[str, Any]) -> list[str]:
    """The options of a command line again, without the name, the target, the model, and the
    profile, which is one person's.

    Raises UsageError for a value that no file of a repository may hold.
    """
    words = [] if file is None else ["--file", file.as_posix()]
    canary = given.get("canary") or {}
    words += [word for alarm in canary.get("alarms", ()) for word in ("--alarm", alarm)]
    named = {key: given.get(key) for key in ("region", "image", "role")} | {
        "canary": canary.get("percent"),
        "bake": canary.get("bake"),
    }
    words += [
        word
        for key, value in named.items()
        if value is not None
        for word in (f"--{key}", str(value))
    ]
    words += ["--create-role"] if given.get("create_role") else []
    done = {"name", "target", "model", "profile", "create_role", "github", *named}
    for key, value in given.items():
        if key not in done and value is not None:
            words += [
                word for path, text in _flat(key, value) for word in ("--set", f"{path}={text}")
            ]
    return words


def _flat(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, each in value.items() for pair in _flat(f"{path}.{key}", each)]
    if hidden(value, path.rpartition(".")[2]) != value:
        raise UsageError(
            f"{path} would be in a file of the repository: name a Secret with kubernetes.secrets,"
            " or add it on the platform"
        )
    return [(path, str(value))]


def _place(words: Sequence[str]) -> list[str]:
    """What of `words` says where the deployment is, for commands that need to know no more."""
    places = ("kubernetes.namespace=", "kubernetes.context=")
    found = [
        pair
        for pair in pairwise(words)
        if pair[0] in ("--file", "--region") or (pair[0] == "--set" and pair[1].startswith(places))
    ]
    return [word for pair in found for word in pair]


def _check(spec: DeploySpec, facts: Facts) -> None:
    """What the deployment would refuse is refused here."""
    if spec.model.is_absolute() or ".." in spec.model.parts:
        raise UsageError(
            f"--emit github: {spec.model} is outside of the repository; give its path from there"
        )
    if spec.target != "kubernetes":
        template(spec, facts)
        return
    manifests(spec, "image", {})
    if spec.image is None and spec.repository is None:
        raise UsageError(
            "--emit github: neither image nor repository is given: --set repository=HOST/NAME is"
            " where the workflow pushes the image"
        )
