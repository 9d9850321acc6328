"""Runs `function.handler` by AWS's own client of the Runtime API, awslambdaric: one invocation
after the other.
"""

from __future__ import annotations

import logging

from awslambdaric import bootstrap
from awslambdaric.lambda_runtime_client import LambdaRuntimeClient

from tsx_runtime.targets.aws_lambda import function


class _Client(LambdaRuntimeClient):  # type: ignore[misc]  # it has no types
    """Takes no further invocation once the environment is of no use: Lambda then starts a fresh
    one.
    """

    def wait_next_invocation(self) -> object:
        if why := function.handler.function.over:
            function.leave(why)
        return super().wait_next_invocation()


def run(handler: str, address: str) -> int:
    """`handler` is a dotted name, as Lambda takes it. Does not return."""
    logging.getLogger("tsx").setLevel(logging.INFO)
    bootstrap.run(handler, _Client(address, False))
    return 0
