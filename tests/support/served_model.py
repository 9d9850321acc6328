"""A loaded model for tests of worker code, without a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsx_runtime.wire import request_meta
from tsx_runtime.worker.execution.batch import ServedModel, answer_batch, send_nowhere
from tsx_runtime.worker.execution.recovery import Ceiling
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import Coroutines, LoadedHandler
from tsx_runtime.worker.handler_api.metrics import Metrics


def a_context(**changes: Any) -> Context:
    """Make a context of model `m`; `changes` are arguments of `Context`."""
    arguments = {"manifest": {}, "batch_size": 1, "gpu": None, "mms_version": "1"} | changes
    return Context("m", "/m", **arguments)


def a_served_model(handle: Any, instance: Any = None, **changes: Any) -> ServedModel:
    """Make a model whose handler is `handle(data, context)`; `changes` are its fields."""
    fields: dict[str, Any] = {
        "context": a_context(metrics=Metrics("m")),
        "decode": True,
        "max_response_size": 1 << 20,
    }
    return ServedModel(
        LoadedHandler(handle, "handler.py", instance),
        coroutines=Coroutines(),
        ceiling=Ceiling(),
        metrics=Metrics("m"),
        **fields | changes,
    )


def answers_of(
    model: ServedModel, *bodies: Any, headers: Sequence[tuple[bytes, bytes]] = (), send: Any = None
) -> list[tuple[int, bytes, bytes]]:
    """Return the responses (status, headers, body) to one batch of requests."""
    items = [
        (0, request_meta(f"id-{number}", b"", headers), body) for number, body in enumerate(bodies)
    ]
    answers = answer_batch(model, items, send or send_nowhere).answers
    return [(status, bytes(block), bytes(body)) for status, block, body in answers]
