"""What a deployment to AWS is made of, by its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.targets import lambda_, sagemaker

MAKERS: Mapping[str, Callable[[DeploySpec, Facts], list[Resource]]] = {"sagemaker": sagemaker.resources, "lambda": lambda_.resources}


def wanted(spec: DeploySpec, facts: Facts) -> list[Resource]:
    """Raises UsageError."""
    return MAKERS[spec.target](spec, facts)
