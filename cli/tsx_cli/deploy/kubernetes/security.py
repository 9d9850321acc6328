"""The tokens of a deployment on Kubernetes; pure functions."""

from __future__ import annotations

from tsx_cli.deploy.container.resources import OPEN_VARIABLE
from tsx_cli.deploy.spec import DeploySpec

TOKENS = {  # variable -> key of the Secret
    "TSX_INFERENCE_TOKEN": "inference",
    "TSX_MANAGEMENT_TOKEN": "management",
}


def is_token_free(spec: DeploySpec) -> bool:
    return spec.env.get(OPEN_VARIABLE, "").lower() == "true"


def token_secret(spec: DeploySpec) -> str | None:
    """Return the name of the Secret with the tokens.

    The result is None if no tokens are needed, or if `env` and `secrets` set them.
    """
    settings = spec.kubernetes
    names = {*spec.env, *settings.secrets}
    if not settings.tokens or settings.kserve or is_token_free(spec) or names >= TOKENS.keys():
        return None
    return settings.token_secret or f"{spec.name}-tokens"


def secret_variables(spec: DeploySpec) -> dict[str, str]:
    """Return the variables that are read from a Secret, each with SECRET/KEY."""
    secret = token_secret(spec)
    tokens = {} if secret is None else {name: f"{secret}/{key}" for name, key in TOKENS.items()}
    return {
        name: reference
        for name, reference in (tokens | spec.kubernetes.secrets).items()
        if name not in spec.env
    }


def secret_step(spec: DeploySpec) -> str:
    """Return the command that creates the Secret, for files that are applied by hand.

    Tokens do not belong in committed files.
    """
    secret = token_secret(spec)
    if secret is None or spec.kubernetes.token_secret is not None:
        return ""
    values = " ".join(f'--from-literal={key}="$(openssl rand -hex 32)"' for key in TOKENS.values())
    return (
        f"kubectl create secret generic {secret} --namespace {spec.kubernetes.namespace} {values},"
        " once, then "
    )
