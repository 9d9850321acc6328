"""A model as a Lambda function, which is loaded while the environment starts.

Lambda freezes the process between two invocations. Nothing here may therefore rely on timers that
would run in that time. The event loop runs while the function waits for the model, and during
invocations. The worker is a thread of this process, and uses the same channel as other workers.

Both clients of the Runtime API use `Function`. AWS's client calls it by `handler(event, context)`.
`run.py` selects the client.
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
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tsx_archiver import ArchiveError
from tsx_runtime.core.hidden_credentials import hidden_variables
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.threads import ThreadStarter
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import LoadFailed, TsxError, Unavailable
from tsx_runtime.server.startup import StartModel, load_all, models_from_settings
from tsx_runtime.settings.sources import find_config
from tsx_runtime.targets.aws_lambda import events
from tsx_runtime.targets.aws_lambda.app import LambdaApp
from tsx_runtime.targets.aws_lambda.batch_events import ModelAnswer, SqsBatches, answer_all
from tsx_runtime.targets.aws_lambda.environment import (
    MAX_PAYLOAD_BYTES,
    LambdaSettings,
    cache_variables,
    read_environment,
)
from tsx_runtime.targets.aws_lambda.events import EventRequest
from tsx_runtime.targets.aws_lambda.http_events import (
    SAFE_BODY_BYTES,
    HttpEvents,
    TooLate,
    Write,
    size_error,
    timeout_error,
)
from tsx_runtime.targets.aws_lambda.results import ResultSender
from tsx_runtime.targets.image.environment import locate_model, read_settings_over
from tsx_runtime.targets.image.model_discovery import find_model

ANSWER_MARGIN_S = 0.5  # time between the last possible answer and an invocation's end

logger = logging.getLogger("tsx.lambda")


class StillLoading(Unavailable):
    """The model was not loaded within the invocation's time."""


class Function:
    """A function: the models of an environment, which answer its events.

    `end_reason` is not empty if the environment should end after the current invocation.
    """

    def __init__(self, environment: LambdaSettings, env: Mapping[str, str]) -> None:
        """Read the settings.

        Raises:
            SettingError: A setting is unknown, or its value cannot be used.
        """
        settings = read_settings_over(
            environment.variables, env, find_config(None, env, Path.cwd()), logger.warning
        )
        if getattr(settings, "otlp_endpoint", None) is not None:
            logger.warning(
                "otlp_endpoint changes nothing here: a frozen environment cannot send traces"
            )
        self.options = environment.options
        self.end_reason = ""
        self._settings = settings
        self._order = environment.order
        self._env = env
        self._starter = ThreadStarter(hidden=hidden_variables(settings, env))
        self._results = ResultSender(owner=environment.options.results_owner)
        self._start = time.monotonic()
        self._max_seconds = 0.0  # time of the longest invocation so far
        self._is_logged = False

    async def start(self) -> None:
        """Start to load the model.

        Raises:
            SettingError: There is no model, or there are several.
        """
        location = locate_model(self._env)
        models = models_from_settings(self._settings) or [
            find_model(location.directory, self._env, location.name)
        ]
        self._registry = Registry(self._settings, starter=self._starter)
        models_with_options = [
            replace(model, order=replace(model.order, **self._order)) for model in models
        ]
        self._loading = asyncio.ensure_future(self._load(models_with_options))
        self._http = HttpEvents(
            LambdaApp(self._registry, self._settings),
            self.options.base_path,
            self._wait_for_model,
            self._make_timeout_error,
        )
        self._queue = SqsBatches(
            self._registry, self.options.results, self._results, self._make_timeout_error
        )

    async def wait_until_loaded(self, seconds: float | None) -> bool:
        """Wait at most `seconds` for the model, and tell whether it is loaded.

        Raises:
            LoadFailed: The model could not be loaded.
        """
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
        """Log a failed load once, because clients do not get the traceback."""
        if not self._is_logged:
            self._is_logged = True
            trace = f"\n{error.traceback}" if error.traceback else ""
            logger.error("the model does not load: %s%s", error.message, trace)

    async def answer(self, event: Any, context: Any, write: Write | None = None) -> Any:
        """Answer an invocation.

        Returns:
            The answer, or None if the answer to an HTTP request was passed to `write`.

        Raises:
            TsxError: The invocation failed.
        """
        try:
            return await self._answer(event, context, write)
        finally:
            self.end_reason = self.end_reason or self._find_end_reason()
            await self.save(answer_time_s(context), ends=bool(self.end_reason))

    async def save(self, seconds: float, *, ends: bool) -> None:
        """Let the features save for `seconds` what the end of the process would lose."""
        for feature in self._registry.features:
            await feature.before_freeze(seconds, ends=ends)

    def _find_end_reason(self) -> str:
        """Return the reason why this process cannot run a worker any more, or an empty string."""
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
        seconds = answer_time_s(context)
        self._max_seconds = max(self._max_seconds, seconds)
        if events.is_http(event):
            if write is None:
                return await self._http.answer(event, context, seconds)
            return await self._http.stream(event, context, seconds, write)
        deadline = time.monotonic() + seconds
        requests = (
            None if events.is_warm_up(event) or events.is_sqs(event) else events.parse_event(event)
        )
        try:
            await asyncio.wait_for(self._wait_for_model(), seconds)
        except asyncio.TimeoutError:
            raise self._make_timeout_error() from None
        if requests is not None:
            return await self._answer_requests(requests, deadline)
        return (
            await self._queue.answer(event, deadline - time.monotonic())
            if events.is_sqs(event)
            else {"warm": True}
        )

    async def _load(self, models: list[StartModel]) -> None:
        await load_all(self._registry, models)
        logger.info(
            "the model was loaded %.2f s after its function started", time.monotonic() - self._start
        )

    async def _wait_for_model(self) -> None:
        """Wait until the model is loaded.

        Raises:
            Unavailable: The model could not be loaded, so the environment will end.
        """
        if not self._loading.done():
            await asyncio.wait([self._loading])
        try:
            await self.wait_until_loaded(None)
        except LoadFailed as error:
            self.log_failure(error)
            self.end_reason = error.message
            raise Unavailable(error.message) from error

    def _make_timeout_error(self) -> TsxError:
        """Return the error for a timeout, and possibly set `end_reason`.

        If the worker may still run the request, it would delay the next one. The environment ends
        in this case.
        """
        if not self._loading.done():
            text = (
                "The model has been loading for %.0f s. Try again, or raise the timeout or the"
                " memory."
            )
            return StillLoading(text % (time.monotonic() - self._start), retry_after=1)
        if self.options.concurrency == 1 or self._is_hanging():
            self.end_reason = "an invocation was abandoned; the model may still be processing it"
        return timeout_error()

    def _is_hanging(self) -> bool:
        """Tell whether a batch has run for longer than the longest invocation."""
        channels = [worker.channel for worker in self._registry.workers()]
        return any(
            channel and channel.sent and time.monotonic() - channel.began > self._max_seconds
            for channel in channels
        )

    async def _answer_requests(self, requests: EventRequest, deadline: float) -> Any:
        answers = await answer_all(self._registry, requests.requests, deadline - time.monotonic())
        if any(isinstance(answer, TooLate) for answer in answers):
            self._make_timeout_error()
        if requests.is_list:
            result: Any = [_to_list_item(answer) for answer in answers]
        else:
            [answer] = answers
            if isinstance(answer, TsxError):
                raise answer
            if answer.status >= 400:
                raise HandlerFailed(answer)
            result = to_json_value(answer)
        size = sum(len(answer.body) for answer in answers if isinstance(answer, ModelAnswer))
        if size > SAFE_BODY_BYTES and (payload_size := len(json.dumps(result))) > MAX_PAYLOAD_BYTES:
            raise size_error(payload_size, size)
        return result


class HandlerFailed(TsxError):
    """The handler has answered a direct invocation with an error status.

    Lambda returns this to the caller as a function error.
    """

    def __init__(self, answer: ModelAnswer) -> None:
        super().__init__(f"{answer.status}: {answer.body.decode('utf-8', 'replace').strip()}")
        self.status = answer.status


def answer_time_s(context: Any) -> float:
    """Return the seconds in which an invocation must be answered."""
    remaining_s: float = context.get_remaining_time_in_millis() / 1000
    return max(remaining_s - ANSWER_MARGIN_S, remaining_s / 2)


def to_json_value(answer: ModelAnswer) -> Any:
    """Return the result of a direct invocation as a JSON value.

    A JSON body is parsed, and text becomes a string. Anything else is base64 in an object, as in
    API Gateway's format.
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


def _to_list_item(answer: ModelAnswer | TsxError) -> dict[str, Any]:
    if isinstance(answer, TsxError):
        return {"status": answer.status, "error": answer.message}
    return {
        "status": answer.status,
        "error" if answer.status >= 400 else "answer": to_json_value(answer),
    }


class Handler:
    """The callable `handler(event, context)` for AWS's client, which has a single thread."""

    def __init__(self, env: MutableMapping[str, str]) -> None:
        """Start to load the model, and wait as long as `start_function` does.

        Raises:
            SettingError: A setting cannot be used.
            LoadFailed: The model could not be loaded.
        """
        self._loop = asyncio.new_event_loop()
        self.function = self._loop.run_until_complete(start_function(env))

    def __call__(self, event: Any, context: Any) -> Any:
        return self._loop.run_until_complete(self.function.answer(event, context))


async def start_function(env: MutableMapping[str, str]) -> Function:
    """Create a function, and wait for its model as long as the start-up phase allows.

    Raises:
        SettingError: A setting cannot be used.
        LoadFailed: The model could not be loaded.
    """
    env.update(cache_variables(env))
    environment = read_environment(env)
    function = Function(environment, env)
    await function.start()
    wait_s = environment.options.init_wait
    try:
        await function.wait_until_loaded(
            None if wait_s is None else max(0.0, wait_s - _process_age_s())
        )
    except LoadFailed as error:
        if wait_s is None:
            raise
        function.log_failure(error)  # The first invocation will return the error.
    return function


def end_process(reason: str, code: int = 1) -> None:
    """End the process at once; a hanging thread would delay a normal exit.

    Lambda then starts a new environment.
    """
    if reason:
        print(f"this environment ends, and Lambda starts a new one: {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _process_age_s() -> float:
    """Return the time since this process was started."""
    return max(0.0, time.time() - psutil.Process().create_time())


def __getattr__(name: str) -> Any:
    """Create `handler` at its first use, so that importing this module loads no model."""
    if name == "handler":
        return _create_handler()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _create_handler() -> Handler:
    return Handler(os.environ)
