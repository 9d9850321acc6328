"""A model as a Lambda function: loads while the environment starts, and answers events of every
kind.

Between two invocations the environment is frozen, and the event loop with it: nothing here relies
on time that passes then. The worker is a thread of this process, on the same channel as any other;
its event loop runs while the model is waited for, and during invocations.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tsx_archiver import ArchiveError
from tsx_runtime.core.isolation.hidden_credentials import hidden_variables
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.threads import ThreadStarter
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import LoadFailed, TsxError, Unavailable
from tsx_runtime.settings.sources import find_config
from tsx_runtime.targets.aws_lambda import events as events
from tsx_runtime.targets.aws_lambda.app import LambdaApp
from tsx_runtime.targets.aws_lambda.batch_events import ModelAnswer, SqsBatches, answer_all
from tsx_runtime.targets.aws_lambda.environment import (
    LARGEST,
    REMOVED,
    LambdaSettings,
    homes,
    read_environment,
)
from tsx_runtime.targets.aws_lambda.events import EventRequest
from tsx_runtime.targets.aws_lambda.http_events import (
    SURELY_FITS,
    Http,
    TooLate,
    Write,
    too_large,
    too_late,
)
from tsx_runtime.targets.aws_lambda.results import ResultSender
from tsx_runtime.targets.image.environment import locate_model, settings_over
from tsx_runtime.targets.image.model_discovery import found_model
from tsx_runtime.targets.server.startup import StartModel, load_all, models_from_settings

MARGIN = 0.5  # seconds before an invocation's end at which it is answered in any case

logger = logging.getLogger("tsx.lambda")


class StillLoading(Unavailable):
    """The model was not loaded within the invocation's time."""


class Function:
    """The models of an environment, and the answers to its events.

    `over` is the reason to end the environment, or empty.
    """

    def __init__(self, environment: LambdaSettings, env: Mapping[str, str]) -> None:
        """Raises SettingError."""
        settings = settings_over(
            environment.variables, env, find_config(None, env, Path.cwd()), logger.warning
        )
        if settings.otlp_endpoint is not None:
            logger.warning(
                "otlp_endpoint changes nothing here: a frozen environment cannot send traces"
            )
        if env.get(REMOVED):
            logger.warning("%s no longer exists, so it has no effect; remove it", REMOVED)
        self.own = environment.own
        self.over = ""
        self._settings = settings
        self._order = environment.order
        self._env = env
        self._starter = ThreadStarter(hidden=hidden_variables(settings, env))
        self._results = ResultSender(owner=environment.own.results_owner)
        self._began = time.monotonic()
        self._longest = 0.0  # seconds that an invocation had
        self._is_logged = False

    async def start(self) -> None:
        """Begin to load the model. Raises SettingError where it cannot be found."""
        place = locate_model(self._env)
        models = models_from_settings(self._settings) or [
            found_model(place.directory, self._env, place.name)
        ]
        self._registry = Registry(self._settings, starter=self._starter)
        ordered = [replace(model, order=replace(model.order, **self._order)) for model in models]
        self._loading = asyncio.ensure_future(self._load(ordered))
        self._http = Http(
            LambdaApp(self._registry, self._settings), self.own.base_path, self._wait, self._late
        )
        self._queue = SqsBatches(self._registry, self.own.results, self._results, self._late)

    async def loaded(self, seconds: float | None) -> bool:
        """Whether the model is loaded within that time. Raises LoadFailed."""
        await asyncio.wait([self._loading], timeout=seconds)
        if not self._loading.done():
            return False
        try:
            self._loading.result()
        except (TsxError, ArchiveError) as error:
            trace = error.traceback if isinstance(error, TsxError) else None
            raise LoadFailed(
                getattr(error, "message", None) or str(error), traceback=trace
            ) from error
        return True

    def log_failure(self, error: LoadFailed) -> None:
        """Log it once, since no client gets the traceback."""
        if not self._is_logged:
            self._is_logged = True
            trace = f"\n{error.traceback}" if error.traceback else ""
            logger.error("the model does not load: %s%s", error.message, trace)

    async def answer(self, event: Any, context: Any, write: Write | None = None) -> Any:
        """The answer to the invocation; None for an HTTP request whose answer went to `write`.
        Raises TsxError.
        """
        try:
            return await self._answer(event, context, write)
        finally:
            self.over = self.over or self._hopeless()

    def _hopeless(self) -> str:
        """Why this process cannot run a worker any more; empty where it can."""
        if self._starter.stuck:
            return (
                "the handler did not return within responseTimeout, and a thread cannot be killed"
            )
        if any(worker.state is WorkerState.FAILED for worker in self._registry.workers()):
            return "the worker kept dying and is not restarted"
        if self._starter.restarted:
            return "the worker exited, as it does when the device stops responding"
        return ""

    async def _answer(self, event: Any, context: Any, write: Write | None) -> Any:
        seconds = seconds_left(context)
        self._longest = max(self._longest, seconds)
        if events.is_http(event):
            if write is None:
                return await self._http.answer(event, context, seconds)
            return await self._http.stream(event, context, seconds, write)
        end = time.monotonic() + seconds
        requests = (
            None if events.is_warm_up(event) or events.is_sqs(event) else events.parse_event(event)
        )
        try:
            await asyncio.wait_for(self._wait(), seconds)
        except asyncio.TimeoutError:
            raise self._late() from None
        if requests is not None:
            return await self._answer_requests(requests, end)
        return (
            await self._queue.answer(event, end - time.monotonic())
            if events.is_sqs(event)
            else {"warm": True}
        )

    async def _load(self, models: list[StartModel]) -> None:
        await load_all(self._registry, models)
        logger.info(
            "the model was loaded %.2f s after its function started", time.monotonic() - self._began
        )

    async def _wait(self) -> None:
        """Wait for the model.

        Raises Unavailable where it does not load, and marks the environment to be ended.
        """
        if not self._loading.done():
            await asyncio.wait([self._loading])
        try:
            await self.loaded(None)
        except LoadFailed as error:
            self.log_failure(error)
            self.over = error.message
            raise Unavailable(error.message) from error

    def _late(self) -> TsxError:
        """The error of a request that ran out of time.

        A worker that still runs it would delay the next one.
        """
        if not self._loading.done():
            text = (
                "The model has been loading for %.0f s. Try again, or raise the timeout or the"
                " memory."
            )
            return StillLoading(text % (time.monotonic() - self._began), retry_after=1)
        if self.own.concurrency == 1 or self._hangs():
            self.over = "an invocation was abandoned; the model may still be processing it"
        return too_late()

    def _hangs(self) -> bool:
        """Whether the model has run a batch for longer than any of its invocations may have waited
        for it.
        """
        channels = [worker.channel for worker in self._registry.workers()]
        return any(
            channel and channel.sent and time.monotonic() - channel.began > self._longest
            for channel in channels
        )

    async def _answer_requests(self, requests: EventRequest, end: float) -> Any:
        answers = await answer_all(self._registry, requests.requests, end - time.monotonic())
        if any(isinstance(answer, TooLate) for answer in answers):
            self._late()
        if requests.together:
            result: Any = [_as_item(answer) for answer in answers]
        else:
            [answer] = answers
            if isinstance(answer, TsxError):
                raise answer
            if answer.status >= 400:
                raise HandlerFailed(answer)
            result = as_value(answer)
        size = sum(len(answer.body) for answer in answers if isinstance(answer, ModelAnswer))
        if size > SURELY_FITS and (whole := len(json.dumps(result))) > LARGEST:
            raise too_large(whole, size)
        return result


class HandlerFailed(TsxError):
    """The handler answered a direct invocation with an error status: the caller gets a function
    error.
    """

    def __init__(self, answer: ModelAnswer) -> None:
        super().__init__(f"{answer.status}: {answer.body.decode('utf-8', 'replace').strip()}")
        self.status = answer.status


def seconds_left(context: Any) -> float:
    left: float = context.get_remaining_time_in_millis() / 1000
    return max(left - MARGIN, left / 2)


def as_value(answer: ModelAnswer) -> Any:
    """The result of a direct invocation: JSON as it is, text as a string, anything else in API
    Gateway's form.
    """
    kind = answer.content_type.partition(";")[0].strip().lower()
    try:
        if kind.endswith("json"):
            return json.loads(answer.body)
        if kind.startswith("text/"):
            return answer.body.decode()
    except (ValueError, RecursionError):
        pass
    headers = {"content-type": answer.content_type}
    return {
        "body": base64.b64encode(answer.body).decode(),
        "isBase64Encoded": True,
        "headers": headers,
    }


def _as_item(answer: ModelAnswer | TsxError) -> dict[str, Any]:
    if isinstance(answer, TsxError):
        return {"status": answer.status, "error": answer.message}
    return {
        "status": answer.status,
        "error" if answer.status >= 400 else "answer": as_value(answer),
    }


async def begin(env: MutableMapping[str, str]) -> Function:
    """A function that has waited for its model as long as its start-up phase lets it.

    Raises SettingError, LoadFailed.
    """
    env.update(homes(env))
    environment = read_environment(env)
    function = Function(environment, env)
    await function.start()
    wait = environment.own.init_wait
    try:
        await function.loaded(None if wait is None else max(0.0, wait - _age()))
    except LoadFailed as error:
        if wait is None:
            raise
        function.log_failure(error)  # the first invocation gets the error
    return function


def leave(why: str, code: int = 1) -> None:
    """End the process at once, since a thread that hangs would delay an orderly exit.

    Lambda starts a fresh environment.
    """
    if why:
        print(f"this environment ends, and Lambda starts a new one: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _age() -> float:
    """Seconds since this process was started."""
    return max(0.0, time.time() - psutil.Process().create_time())
