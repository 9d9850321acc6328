"""tsx's client of Lambda's Runtime API: concurrent invocations share one model and one queue.

AWS's client answers the concurrent invocations of Lambda Managed Instances with a process and a
model each, and so without batches. Here N pollers on one event loop take, answer and repeat. The
requests that wait when the worker is free are its next batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import traceback
from collections.abc import MutableMapping

from tsx_archiver import ArchiveError
from tsx_runtime.errors import TsxError
from tsx_runtime.shared.log_format import JsonLines
from tsx_runtime.targets.aws_lambda import events
from tsx_runtime.targets.aws_lambda.function import Function, end_process, start_function
from tsx_runtime.targets.aws_lambda.runtime_api import (
    ConnectionLost,
    Invocation,
    RequestRefused,
    RuntimeApiConnection,
    StreamedReply,
)
from tsx_runtime.targets.image.environment import RUNTIME_API

STOP_TIMEOUT_S = 1.5  # limit for running invocations once the environment must end
TEXT_FORMAT = "[%(levelname)s]\t%(asctime)s\t%(message)s"

logger = logging.getLogger("tsx.lambda")


def run(env: MutableMapping[str, str]) -> int:
    """Run until the environment ends or is unusable.

    Returns:
        The exit code, which is 1 if a fresh environment should replace this one.
    """
    _set_up_logging(env)
    return asyncio.run(_run(env))


async def _run(env: MutableMapping[str, str]) -> int:
    address = env[RUNTIME_API]
    try:
        function = await start_function(env)
    except (TsxError, ArchiveError, OSError) as error:
        message = getattr(error, "message", str(error))
        trace = getattr(error, "traceback", None) or ""
        logger.error("the function cannot start: %s\n%s", message, trace)
        await RuntimeApiConnection(address).fail_init(
            type(error).__name__, message, trace.splitlines()
        )
        return 1
    pollers = [
        Poller(function, RuntimeApiConnection(address)) for _ in range(function.options.concurrency)
    ]
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    running = {asyncio.create_task(poller.run()): poller for poller in pollers}
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    busy = [task for task, poller in running.items() if poller.leave() and not task.done()]
    for task in running.keys() - busy:
        task.cancel()  # It waits for an invocation, which would stay unanswered.
    if busy:
        await asyncio.wait(busy, timeout=STOP_TIMEOUT_S if stopped.is_set() else None)
    for task in running:
        if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
            logger.error(
                "%s", failure, exc_info=None if isinstance(failure, ConnectionLost) else failure
            )
    end_process(function.end_reason, 0 if stopped.is_set() else 1)
    return 1


class Poller:
    """A handler of one invocation after the other."""

    def __init__(self, function: Function, connection: RuntimeApiConnection) -> None:
        self._busy = self._leaving = False
        self._function = function
        self._connection = connection

    async def run(self) -> None:
        """Run until the environment is unusable or `leave` was called.

        Raises:
            ConnectionLost: The Runtime API is gone.
        """
        try:
            while not (self._function.end_reason or self._leaving):
                invocation = await self._connection.next()
                self._busy = True
                try:
                    await self._serve(invocation)
                except RequestRefused as error:
                    logger.error(
                        "invocation %s could not be answered: %s", invocation.aws_request_id, error
                    )
                self._busy = False
        finally:
            self._connection.close()

    def leave(self) -> bool:
        """Take no further invocation, which would be lost with the environment.

        Returns:
            Whether an invocation is being answered.
        """
        self._leaving = True
        return self._busy

    async def _serve(self, invocation: Invocation) -> None:
        parts = self._connection.parts(invocation.aws_request_id)
        try:
            event = json.loads(invocation.body)
            streams = self._function.options.streams and events.is_http(event)
            answer = await self._function.answer(
                event, invocation, parts.write if streams else None
            )
            if streams:
                await parts.end()
            else:
                await self._connection.answer(
                    invocation.aws_request_id, json.dumps(answer).encode()
                )
        except (ConnectionLost, RequestRefused):
            raise
        except TsxError as error:
            await self._fail(invocation, parts, error, error.message, [])
        except Exception as error:  # the boundary of an invocation
            logger.error(
                "invocation %s failed unexpectedly", invocation.aws_request_id, exc_info=error
            )
            await self._fail(
                invocation, parts, error, str(error), traceback.format_tb(error.__traceback__)
            )

    async def _fail(
        self,
        invocation: Invocation,
        parts: StreamedReply,
        error: Exception,
        message: str,
        trace: list[str],
    ) -> None:
        kind = type(error).__name__
        if parts.has_begun:
            await parts.end(kind, message)
        else:
            await self._connection.fail(invocation.aws_request_id, kind, message, trace)


def _set_up_logging(env: MutableMapping[str, str]) -> None:
    """Set up the log with the format and level of the function's configuration."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        JsonLines()
        if env.get("AWS_LAMBDA_LOG_FORMAT", "").upper() == "JSON"
        else logging.Formatter(TEXT_FORMAT)
    )
    level = logging.getLevelName(env.get("AWS_LAMBDA_LOG_LEVEL", "INFO").upper())
    logging.basicConfig(level=level if isinstance(level, int) else logging.INFO, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
