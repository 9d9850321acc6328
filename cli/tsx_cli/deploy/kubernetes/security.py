"""The tokens of a deployment on Kubernetes. Pure functions."""

from __future__ import annotations

from tsx_cli.deploy.container.resources import OPEN
from tsx_cli.deploy.spec import DeploySpec

TOKENS = {  # variable -> key of the Secret
    "TSX_INFERENCE_TOKEN": "inference",
    "TSX_MANAGEMENT_TOKEN": "management",
}


def is_open(spec: DeploySpec) -> bool:
    return spec.env.get(OPEN, "").lower() == "true"


def token_secret(spec: DeploySpec) -> str | None:
    """The Secret that tokens are read from; None where none are needed, or where `env` and
    `secrets` set them.
    """
    own = spec.kubernetes
    given = {*spec.env, *own.secrets}
    if not own.tokens or own.kserve or is_open(spec) or given >= TOKENS.keys():
        return None
    return own.token_secret or f"{spec.name}-tokens"


def secret_variables(spec: DeploySpec) -> dict[str, str]:
    """Each variable that is read from a Secret, with SECRET/KEY."""
    secret = token_secret(spec)
    tokens = {} if secret is None else {name: f"{secret}/{key}" for name, key in TOKENS.items()}
    return {
        name: place
        for name, place in (tokens | spec.kubernetes.secrets).items()
        if name not in spec.env
    }


def secret_step(spec: DeploySpec) -> str:
    """The command that creates the Secret of files that are applied by hand: tokens do not belong
    in files that are committed.
    """
    secret = token_secret(spec)
    if secret is None or spec.kubernetes.token_secret is not None:
        return ""
    values = " ".join(f'--from-literal={key}="$(openssl rand -hex 32)"' for key in TOKENS.values())
    return (
        f"kubectl create secret generic {secret} --namespace {spec.kubernetes.namespace} {values},"
        " once, then "
    )
