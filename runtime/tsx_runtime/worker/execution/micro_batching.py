"""Micro-batches: splits a batch, and runs its parts through preprocess, inference and postprocess
in parallel.

So the next part is preprocessed while the model runs this one. Contract section 6.2:

    class MyHandler(ImageClassifier):
        def __init__(self):
            super().__init__()
            self.handle = MicroBatching(self, micro_batch_size=4, parallelism={"preprocess": 2})

Handlers derived from `BaseHandler` that do not call it themselves get it from `micro_batching:` in
model-config.yaml.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tsx_runtime.worker.exceptions import BadRows, LoadError
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.step_times import STAGES
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import LoadedHandler

BASE = "tsx_runtime.worker.handlers.base"


class MicroBatching:
    """Stands in for `parent_handler.handle`.

    `parallelism` gives the number of threads of a stage, 1 by default.
    """

    def __init__(
        self,
        parent_handler: Any,
        micro_batch_size: int = 1,
        parallelism: Mapping[str, int] | None = None,
    ) -> None:
        self.handler = parent_handler
        self._size = _whole("micro_batch_size", micro_batch_size)
        self._parallelism = _parallelism(parallelism)
        self._pools: list[ThreadPoolExecutor] | None = None
        self._here = threading.local()

    @property
    def micro_batch_size(self) -> int:
        return self._size

    @micro_batch_size.setter
    def micro_batch_size(self, size: int) -> None:
        self._size = _whole("micro_batch_size", size)

    @property
    def parallelism(self) -> dict[str, int]:
        """Threads of each stage. Set it as a whole, between two batches."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        self.shutdown()
        self._parallelism = _parallelism(parallelism)

    def __call__(self, data: Any, context: Context) -> Any:
        return self.handle(data, context)

    def handle(self, data: Any, context: Context) -> Any:
        handler = self.handler
        # explanations, descriptions and traces are made of the whole
        if (
            os.environ.get("ENABLE_TORCH_PROFILER")
            or not data
            or any(
                context.get_request_header(0, what) == "True" for what in ("explain", "describe")
            )
        ):
            return type(handler).handle(handler, data, context)
        start = time.perf_counter()
        handler.context = context
        parts = [
            range(at, min(at + self._size, len(data))) for at in range(0, len(data), self._size)
        ]
        results = self._run(data, parts, context)
        if context.metrics is not None:
            context.metrics.add_time(
                "HandlerTime", round((time.perf_counter() - start) * 1000, 2), None, "ms"
            )
        return results

    def get_micro_batch_idx(self) -> int:
        """Which part of its batch this thread works on, from 0."""
        return getattr(self._here, "number", 0)

    def shutdown(self) -> None:
        """End the threads; the next batch starts others."""
        pools, self._pools = self._pools, None
        for pool in pools or ():
            pool.shutdown()

    def _run(self, data: Sequence[Any], parts: list[range], context: Context) -> list[Any]:
        if self._pools is None:
            take_over = torch_state()
            self._pools = [
                ThreadPoolExecutor(self._parallelism[stage], f"tsx-{stage}", initializer=take_over)
                for stage in STAGES
            ]
        flows = [
            _Flow(self, self._pools, context, number, part, [data[idx] for idx in part])
            for number, part in enumerate(parts)
        ]
        results: list[Any] = []
        error: BaseException | None = None
        for flow in (
            flows
        ):  # all of them, also where one failed: a stage that still runs would get the next batch
            try:
                results += _as_list(flow.done.result(), flow.part)
            except BaseException as raised:  # raised again below
                error = error or raised
        if error is not None:
            raise error
        return results


class _Flow:
    """One micro-batch and its way through the stages."""

    def __init__(
        self,
        owner: MicroBatching,
        pools: Sequence[ThreadPoolExecutor],
        context: Context,
        number: int,
        part: range,
        rows: list[Any],
    ) -> None:
        self.part = part
        self._number = number
        self._here = owner._here
        self.done: Future[Any] = Future()
        self._pools = pools
        self._handler = owner.handler
        self._context = context
        self._laps = step_times.current()
        pools[0].submit(self._step, 0, rows)

    def _step(self, stage: int, data: Any) -> None:
        self._here.number = self._number
        if self._laps is not None:
            step_times.begin(self._laps)
        try:
            with self._context.part(self.part):
                data = getattr(self._handler, STAGES[stage])(data)
            if stage + 1 < len(STAGES):
                self._pools[stage + 1].submit(self._step, stage + 1, data)
                return
        except BadRows as error:
            self.done.set_exception(
                BadRows(
                    {self.part.start + idx: why for idx, why in error.faults.items()},
                    error.error_code,
                )
            )
        except (
            BaseException
        ) as error:  # the thread's boundary: it is raised where the batch is put together
            self.done.set_exception(error)
        else:
            self.done.set_result(data)


def with_micro_batches(entry: LoadedHandler, context: Context) -> LoadedHandler:
    """Micro-batches as `micro_batching` in model-config.yaml says, unless the handler makes its
    own. Raises `LoadError`.
    """
    wanted = context.model_yaml_config.get("micro_batching")
    if wanted is None or not is_handled_by_base(entry):
        return entry
    if not isinstance(wanted, Mapping):
        raise LoadError(
            f"micro_batching in model-config.yaml is {wanted!r}; it must hold micro_batch_size and"
            " parallelism."
        )
    try:
        return entry._replace(
            call=MicroBatching(
                entry.instance, wanted.get("micro_batch_size", 1), wanted.get("parallelism")
            )
        )
    except ValueError as error:
        raise LoadError(f"micro_batching in model-config.yaml: {error}") from error


def is_handled_by_base(entry: LoadedHandler) -> bool:
    """Whether the handler is derived from `BaseHandler` and has no `handle` of its own."""
    base = getattr(sys.modules.get(BASE), "BaseHandler", None)
    handler = entry.instance
    return (
        base is not None
        and isinstance(handler, base)
        and entry.call == base.handle.__get__(handler)
    )


def _as_list(result: Any, part: range) -> list[Any]:
    if not isinstance(result, list):
        raise TypeError(
            f"postprocess returned {type(result).__name__} for a micro-batch; it must return a list"
            " with one entry per request"
        )
    if len(result) != len(part):
        raise ValueError(
            f"postprocess returned {len(result)} entries for a micro-batch of {len(part)} requests"
        )
    return result


def _parallelism(given: Mapping[str, int] | None) -> dict[str, int]:
    given = given or {}
    if unknown := sorted(set(given) - set(STAGES)):
        raise ValueError(
            f"parallelism has no stage {unknown[0]!r}; the stages are {', '.join(STAGES)}"
        )
    return {stage: _whole(f"parallelism of {stage}", given.get(stage, 1)) for stage in STAGES}


def _whole(what: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ValueError(f"{what} is {value!r}; it must be a whole number, 1 or more")
    return value


def torch_state() -> Callable[[], None]:
    """Torch's settings of this thread, for the other threads."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def take_over() -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        if device is not None:
            torch.cuda.set_device(device)

    return take_over
