"""tsx's client of Lambda's Runtime API: concurrent invocations share one model and one queue.

AWS's client runs each concurrent invocation of Lambda Managed Instances in a process of its own,
with a separate model, and so without batches. Here, several pollers on one event loop take
invocations. The requests that wait when the worker becomes free form its next batch.
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

STOP_TIMEOUT_S = 1.5  # limit for running invocations after SIGTERM
TEXT_FORMAT = "[%(levelname)s]\t%(asctime)s\t%(message)s"

logger = logging.getLogger("tsx.lambda")


def run(env: MutableMapping[str, str]) -> int:
    """Run until the environment ends or is unusable.

    Returns:
        The exit code, which is 1 if Lambda should start a new environment.
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
        await RuntimeApiConnection(address).report_init_failure(
            type(error).__name__, message, trace.splitlines()
        )
        return 1
    pollers = [
        Poller(function, RuntimeApiConnection(address)) for _ in range(function.options.concurrency)
    ]
    stop_event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_event.set)
    pollers_by_task = {asyncio.create_task(poller.run()): poller for poller in pollers}
    stop_task = asyncio.create_task(stop_event.wait())
    await asyncio.wait([stop_task, *pollers_by_task], return_when=asyncio.FIRST_COMPLETED)
    busy_tasks = [
        task for task, poller in pollers_by_task.items() if poller.stop() and not task.done()
    ]
    for task in pollers_by_task.keys() - busy_tasks:
        task.cancel()  # This poller waits for an invocation, which it could not answer any more.
    if busy_tasks:
        await asyncio.wait(busy_tasks, timeout=STOP_TIMEOUT_S if stop_event.is_set() else None)
    if stop_event.is_set():
        await function.save(STOP_TIMEOUT_S, ends=True)
    for task in pollers_by_task:
        if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
            logger.error(
                "%s", failure, exc_info=None if isinstance(failure, ConnectionLost) else failure
            )
    end_process(function.end_reason, 0 if stop_event.is_set() else 1)
    return 1


class Poller:
    """A poller that takes and answers one invocation after the other."""

    def __init__(self, function: Function, connection: RuntimeApiConnection) -> None:
        self._is_busy = self._is_stopping = False
        self._function = function
        self._connection = connection

    async def run(self) -> None:
        """Run until the environment is unusable or `stop` has been called.

        Raises:
            ConnectionLost: The Runtime API is lost.
        """
        try:
            while not (self._function.end_reason or self._is_stopping):
                invocation = await self._connection.next()
                self._is_busy = True
                try:
                    await self._serve(invocation)
                except RequestRefused as error:
                    logger.error(
                        "invocation %s could not be answered: %s", invocation.aws_request_id, error
                    )
                self._is_busy = False
        finally:
            self._connection.close()

    def stop(self) -> bool:
        """Take no further invocations, because the environment ends.

        Returns:
            Whether an invocation is in progress.
        """
        self._is_stopping = True
        return self._is_busy

    async def _serve(self, invocation: Invocation) -> None:
        stream_reply = self._connection.start_stream(invocation.aws_request_id)
        try:
            event = json.loads(invocation.body)
            streams = self._function.options.streams and events.is_http(event)
            answer = await self._function.answer(
                event, invocation, stream_reply.write if streams else None
            )
            if streams:
                await stream_reply.end()
            else:
                await self._connection.answer(
                    invocation.aws_request_id, json.dumps(answer).encode()
                )
        except (ConnectionLost, RequestRefused):
            raise
        except TsxError as error:
            await self._fail(invocation, stream_reply, error, error.message, [])
        except Exception as error:  # the boundary of an invocation
            logger.error(
                "invocation %s failed unexpectedly", invocation.aws_request_id, exc_info=error
            )
            await self._fail(
                invocation,
                stream_reply,
                error,
                str(error),
                traceback.format_tb(error.__traceback__),
            )

    async def _fail(
        self,
        invocation: Invocation,
        stream_reply: StreamedReply,
        error: Exception,
        message: str,
        trace: list[str],
    ) -> None:
        kind = type(error).__name__
        if stream_reply.has_begun:
            await stream_reply.end(kind, message)
        else:
            await self._connection.report_failure(invocation.aws_request_id, kind, message, trace)


def _set_up_logging(env: MutableMapping[str, str]) -> None:
    """Set up the log with the format and level that the function is configured with."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        JsonLines()
        if env.get("AWS_LAMBDA_LOG_FORMAT", "").upper() == "JSON"
        else logging.Formatter(TEXT_FORMAT)
    )
    level = logging.getLevelName(env.get("AWS_LAMBDA_LOG_LEVEL", "INFO").upper())
    logging.basicConfig(level=level if isinstance(level, int) else logging.INFO, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
