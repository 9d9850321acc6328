"""Micro-batches: parts of a batch that pass through the steps of a handler in parallel.

One micro-batch is preprocessed while the model runs another one. See docs/guides/serving-modes.md:

    class MyHandler(ImageClassifier):
        def __init__(self):
            super().__init__()
            self.handle = MicroBatching(self, micro_batch_size=4, parallelism={"preprocess": 2})

For a handler that is derived from `BaseHandler` and does not do this, `micro_batching:` in
model-config.yaml has the same effect.
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

BASE_HANDLER_MODULE = "tsx_runtime.worker.handlers.base"


class MicroBatching:
    """A replacement of `parent_handler.handle` that runs micro-batches.

    `parallelism` is the number of threads of each stage; the default is 1.
    """

    def __init__(
        self,
        parent_handler: Any,
        micro_batch_size: int = 1,
        parallelism: Mapping[str, int] | None = None,
    ) -> None:
        self.handler = parent_handler
        self._size = _check_number("micro_batch_size", micro_batch_size)
        self._parallelism = _check_parallelism(parallelism)
        self._pools: list[ThreadPoolExecutor] | None = None
        self._thread = threading.local()

    @property
    def micro_batch_size(self) -> int:
        return self._size

    @micro_batch_size.setter
    def micro_batch_size(self, size: int) -> None:
        self._size = _check_number("micro_batch_size", size)

    @property
    def parallelism(self) -> dict[str, int]:
        """The number of threads of each stage. Assign a new value only between two batches."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        self.shutdown()
        self._parallelism = _check_parallelism(parallelism)

    def __call__(self, data: Any, context: Context) -> Any:
        return self.handle(data, context)

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch in micro-batches, or as a whole if it asks for more than predictions."""
        handler = self.handler
        # Explanations, descriptions and profiler traces need the whole batch.
        if (
            os.environ.get("ENABLE_TORCH_PROFILER")
            or not data
            or any(
                context.get_request_header(0, name) == "True" for name in ("explain", "describe")
            )
        ):
            return type(handler).handle(handler, data, context)
        start = time.perf_counter()
        handler.context = context
        ranges = [
            range(start_position, min(start_position + self._size, len(data)))
            for start_position in range(0, len(data), self._size)
        ]
        results = self._run(data, ranges, context)
        if context.metrics is not None:
            context.metrics.add_time(
                "HandlerTime", round((time.perf_counter() - start) * 1000, 2), None, "ms"
            )
        return results

    def get_micro_batch_idx(self) -> int:
        """Return the number of the micro-batch, counted from 0, that this thread processes."""
        return getattr(self._thread, "number", 0)

    def shutdown(self) -> None:
        """Stop the threads; the next batch starts new ones."""
        pools, self._pools = self._pools, None
        for pool in pools or ():
            pool.shutdown()

    def _run(self, data: Sequence[Any], ranges: list[range], context: Context) -> list[Any]:
        if self._pools is None:
            apply_settings = capture_torch_settings()
            self._pools = [
                ThreadPoolExecutor(
                    self._parallelism[stage], f"tsx-{stage}", initializer=apply_settings
                )
                for stage in STAGES
            ]
        micro_batches = [
            _MicroBatch(
                self, self._pools, context, number, positions, [data[idx] for idx in positions]
            )
            for number, positions in enumerate(ranges)
        ]
        results: list[Any] = []
        error: BaseException | None = None
        # All micro-batches are awaited, even after one has failed, so that none of them is still
        # running when the next batch starts.
        for micro_batch in micro_batches:
            try:
                results += _check_result(micro_batch.future.result(), micro_batch.positions)
            except BaseException as raised:  # It is raised again below.
                error = error or raised
        if error is not None:
            raise error
        return results


class _MicroBatch:
    """A micro-batch that passes through the stages."""

    def __init__(
        self,
        runner: MicroBatching,
        pools: Sequence[ThreadPoolExecutor],
        context: Context,
        number: int,
        positions: range,
        rows: list[Any],
    ) -> None:
        self.positions = positions
        self._number = number
        self._thread = runner._thread
        self.future: Future[Any] = Future()
        self._pools = pools
        self._handler = runner.handler
        self._context = context
        self._laps = step_times.current_laps()
        pools[0].submit(self._step, 0, rows)

    def _step(self, stage: int, data: Any) -> None:
        self._thread.number = self._number
        if self._laps is not None:
            step_times.begin(self._laps)
        try:
            with self._context.micro_batch(self.positions):
                data = getattr(self._handler, STAGES[stage])(data)
            if stage + 1 < len(STAGES):
                self._pools[stage + 1].submit(self._step, stage + 1, data)
                return
        except BadRows as error:
            self.future.set_exception(
                BadRows(
                    {self.positions.start + idx: fault for idx, fault in error.faults.items()},
                    error.error_code,
                )
            )
        # The error is raised in the thread that collects the results.
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(data)


def with_micro_batches(entry: LoadedHandler, context: Context) -> LoadedHandler:
    """Apply `micro_batching` of model-config.yaml to a handler that leaves `handle` to BaseHandler.

    Raises:
        LoadError: The setting is wrong.
    """
    settings = context.model_yaml_config.get("micro_batching")
    if settings is None or not is_handled_by_base(entry):
        return entry
    if not isinstance(settings, Mapping):
        raise LoadError(
            f"micro_batching in model-config.yaml is {settings!r}; it must hold micro_batch_size"
            " and parallelism."
        )
    try:
        return entry._replace(
            call=MicroBatching(
                entry.instance, settings.get("micro_batch_size", 1), settings.get("parallelism")
            )
        )
    except ValueError as error:
        raise LoadError(f"micro_batching in model-config.yaml: {error}") from error


def is_handled_by_base(entry: LoadedHandler) -> bool:
    """Tell whether the handler is derived from `BaseHandler` and has no `handle` of its own."""
    base = getattr(sys.modules.get(BASE_HANDLER_MODULE), "BaseHandler", None)
    handler = entry.instance
    return (
        base is not None
        and isinstance(handler, base)
        and entry.call == base.handle.__get__(handler)
    )


def _check_result(result: Any, positions: range) -> list[Any]:
    if not isinstance(result, list):
        raise TypeError(
            f"postprocess returned {type(result).__name__} for a micro-batch; it must return a list"
            " with one entry per request"
        )
    if len(result) != len(positions):
        raise ValueError(
            f"postprocess returned {len(result)} entries for a micro-batch of {len(positions)}"
            " requests"
        )
    return result


def _check_parallelism(settings: Mapping[str, int] | None) -> dict[str, int]:
    settings = settings or {}
    if unknown := sorted(set(settings) - set(STAGES)):
        raise ValueError(
            f"parallelism has no stage {unknown[0]!r}; the stages are {', '.join(STAGES)}"
        )
    return {
        stage: _check_number(f"parallelism of {stage}", settings.get(stage, 1)) for stage in STAGES
    }


def _check_number(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    return value


def capture_torch_settings() -> Callable[[], None]:
    """Return a function that applies this thread's torch settings in another thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    threads, is_grad_enabled = torch.get_num_threads(), torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def apply_settings() -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(is_grad_enabled)
        if device is not None:
            torch.cuda.set_device(device)

    return apply_settings
