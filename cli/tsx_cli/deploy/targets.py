"""The targets of `tsx deploy`, by name: modules that are imported when a command needs them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tsx_cli.common.failure import UsageError

if TYPE_CHECKING:
    from tsx_cli.deploy.target import DeployTarget

# The `TARGET` of each module is a DeployTarget.
TARGETS: Mapping[str, str] = {
    "container": "tsx_cli.deploy.container.target",
    "sagemaker": "tsx_cli.deploy.sagemaker.target",
    "lambda": "tsx_cli.deploy.aws_lambda.target",
    "kubernetes": "tsx_cli.deploy.kubernetes.target",
    "ray": "tsx_cli.deploy.ray.target",
}


def find_target(name: str) -> DeployTarget:
    """Return the target with a name.

    Raises:
        UsageError: There is no such target.
    """
    if name not in TARGETS:
        raise UsageError(f"target is '{name}'; choose one of {', '.join(TARGETS)}")
    target: DeployTarget = importlib.import_module(TARGETS[name]).TARGET
    return target
