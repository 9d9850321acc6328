"""AWS's own client of Lambda's Runtime API, awslambdaric, around `aws_lambda.handler`: one invocation after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable

from awslambdaric import bootstrap
from awslambdaric.lambda_runtime_client import LambdaRuntimeClient

from tsx_runtime.targets.aws_lambda.lambda_end import leave


class _Client(LambdaRuntimeClient):  # type: ignore[misc]  # it has no types
    """Asks for no further invocation once the environment is of no use: Lambda then makes a fresh one."""

    def __init__(self, address: str, over: Callable[[], str]) -> None:
        super().__init__(address, False)
        self._over = over

    def wait_next_invocation(self) -> object:
        if why := self._over():
            leave(why)
        return super().wait_next_invocation()


def run(handler: str, address: str, over: Callable[[], str]) -> int:
    """`handler` by its name, as Lambda has it; `over` says why the environment has to end, once it has. Does not return."""
    logging.getLogger("tsx").setLevel(logging.INFO)
    bootstrap.run(handler, _Client(address, over))
    return 0
