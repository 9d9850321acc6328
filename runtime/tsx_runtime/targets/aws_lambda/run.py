"""The start of the function with one of the two clients of the Runtime API."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.util import find_spec

from tsx_runtime.errors import SettingError
from tsx_runtime.targets.aws_lambda.environment import read_environment
from tsx_runtime.targets.image.environment import RUNTIME_API

HANDLER = "tsx_runtime.targets.aws_lambda.function.handler"


def run(env: MutableMapping[str, str]) -> int:
    """Serve until the environment ends.

    Raises:
        SettingError: A variable cannot be used, or this is not Lambda.
    """
    if not env.get(RUNTIME_API):
        raise SettingError(
            f"{RUNTIME_API} is not set: Lambda and its emulators set it, and without it there are"
            " no invocations"
        )
    options = read_environment(env).options
    if options.uses_own_client or (not options.runtime and find_spec("awslambdaric") is None):
        # The import is deferred, so that only one client is imported.
        from tsx_runtime.targets.aws_lambda import runtime_client

        return runtime_client.run(env)
    try:
        # The package awslambdaric is optional.
        from tsx_runtime.targets.aws_lambda import ric_client
    except ModuleNotFoundError as error:
        raise SettingError(
            f"TSX_LAMBDA_RUNTIME is awslambdaric, but {error}. Install it: pip install"
            " 'tsx-serve[lambda]'"
        ) from error
    return ric_client.run(HANDLER, env[RUNTIME_API])
