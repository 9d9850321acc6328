"""What a deployment to AWS is made of, by its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tsx_cli.deploy.aws_lambda import resources as lambda_resources
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.sagemaker import resources as sagemaker_resources
from tsx_cli.deploy.spec import DeploySpec

MAKERS: Mapping[str, Callable[[DeploySpec, Facts], list[Resource]]] = {
    "sagemaker": sagemaker_resources.resources,
    "lambda": lambda_resources.resources,
}


def wanted(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Raises UsageError."""
    return MAKERS[spec.target](spec, facts)
