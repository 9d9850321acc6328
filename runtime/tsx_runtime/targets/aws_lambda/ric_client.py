"""The start of `function.handler` with awslambdaric, which is AWS's client of the Runtime API."""

from __future__ import annotations

import logging

from awslambdaric import bootstrap
from awslambdaric.lambda_runtime_client import LambdaRuntimeClient

from tsx_runtime.targets.aws_lambda import function


class _Client(LambdaRuntimeClient):  # type: ignore[misc]  # The library has no types.
    """A client that ends the process in place of taking an invocation that would fail."""

    def wait_next_invocation(self) -> object:
        """Return the next invocation, or end the process if the environment must end."""
        if reason := function.handler.function.end_reason:
            function.end_process(reason)
        return super().wait_next_invocation()


def run(handler: str, address: str) -> int:
    """Answer invocations one after the other; `handler` is a dotted name, as in Lambda."""
    logging.getLogger("tsx").setLevel(logging.INFO)
    bootstrap.run(handler, _Client(address, False))
    return 0
