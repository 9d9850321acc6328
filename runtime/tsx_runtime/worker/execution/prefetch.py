"""The preparation of the next batch while the model runs this one.

One thread reads frames and runs `preprocess`; the main thread runs the model. This requires three
separate steps, so it is only for handlers derived from `BaseHandler` without their own `handle`.
Batches are answered in their order. If a batch cannot be prepared ahead, the main thread runs all
its steps.

`preprocess` must return everything that the later steps need. If it stored something on `self`,
`postprocess` would find the value of the next batch there. Therefore a user's own `preprocess` is
run ahead only if the model's configuration allows it (`overlapPreprocessing: true`). By default,
only the `preprocess` of tsx's own handlers is run ahead, and only for CUDA devices, where the CPU
would otherwise wait for the GPU.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tsx_runtime.wire import Buffer, Item, Kind
from tsx_runtime.worker.channel import FrameSocket
from tsx_runtime.worker.codecs.responses import Answer
from tsx_runtime.worker.diagnostics import profiling
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import (
    PreparedBatch,
    ServedModel,
    may_ask_explain,
    read_requests,
)
from tsx_runtime.worker.execution.micro_batching import capture_torch_settings, is_handled_by_base

logger = logging.getLogger("tsx.worker")


class OutOfTurn(RuntimeError):
    """The error of a `preprocess`, run ahead, that does what only the current batch may do."""


class ReadBatch(NamedTuple):
    """A batch that was read; `prepared` is None if `preprocess` was not run ahead."""

    batch: int
    items: list[Item]
    prepared: PreparedBatch | None
    # the start of `preprocess`, as `time.monotonic()`, if it was run ahead
    started_at: float | None


def can_overlap_steps(model: ServedModel) -> bool:
    """Tell whether `preprocess` may run for one batch while the model runs the previous one."""
    setting = model.context.model_yaml_config.get("overlapPreprocessing", "auto")
    handler = model.entry.instance
    if (
        model.cost is not None  # Such a batch may have to be split before it is preprocessed.
        or setting is False
        or not model.is_single_process
        or profiling.is_enabled()
        or (setting is not True and not _is_cuda(handler))
    ):
        return False
    if not is_handled_by_base(model.entry) or os.environ.get("ENABLE_TORCH_PROFILER"):
        if setting is True:
            text = (
                "overlapPreprocessing is on, but %s is not derived from BaseHandler, or overrides"
                " its handling of batches: nothing overlaps"
            )
            logger.warning(text, model.entry.name)
        return False
    return setting is True or type(handler).preprocess.__module__.startswith("tsx_runtime.")


def read_ahead(
    channel: FrameSocket, model: ServedModel, on_control_frame: Callable[..., None]
) -> Iterator[ReadBatch]:
    """Yield batches as they arrive, each prepared while the previous one is answered.

    The generator raises the errors of reading, and ends when the front end has closed the socket.
    Other frames are passed to `on_control_frame`.
    """
    model.entry.instance.context = model.context
    ready: queue.Queue[ReadBatch | BaseException | None] = queue.Queue(maxsize=1)
    device_state = (
        _CudaState(model.entry.instance.device)
        if _is_cuda(model.entry.instance)
        else _DeviceState()
    )
    thread = threading.Thread(
        target=_read,
        args=(channel, model, on_control_frame, device_state, ready),
        name="tsx-prepare",
        daemon=True,
    )
    thread.start()
    while (next_batch := ready.get()) is not None:
        if isinstance(next_batch, BaseException):
            raise next_batch
        yield next_batch
        del next_batch  # An idle worker keeps no body in memory.


def _read(
    channel: FrameSocket,
    model: ServedModel,
    on_control_frame: Callable[..., None],
    device_state: _DeviceState,
    ready: queue.Queue[Any],
) -> None:
    try:
        with device_state.entered():
            while (frame := channel.read()) is not None:
                if frame.kind is not Kind.BATCH:
                    on_control_frame(channel, frame)
                    continue
                items = copy_items(frame.items)
                batch, started_at = frame.batch, time.monotonic()
                del frame
                prepared = prepare(model, items, device_state)
                read_batch = ReadBatch(batch, items, prepared, started_at if prepared else None)
                del prepared
                del items
                ready.put(read_batch)
                del read_batch
    # Any error that ends this thread ends the worker, which raises it.
    except BaseException as error:
        ready.put(error)
    else:
        ready.put(None)


def copy_items(items: Sequence[Item]) -> list[Item]:
    """Copy requests that have to wait, since the channel reuses its buffer meanwhile.

    A large body of a single request has its own memory and is not copied. The memoryview keeps the
    handler from changing it: if the batch fails, the body is read again.
    """
    return [
        (code, bytes(meta), memoryview(body) if isinstance(body, bytearray) else bytes(body))
        for code, meta, body in items
    ]


def prepare(
    model: ServedModel, items: Sequence[Item], device_state: _DeviceState
) -> PreparedBatch | None:
    """Run `preprocess` ahead; its error is raised later, when the batch is answered.

    Returns:
        None if the main thread must run all steps of the batch.
    """
    refused: dict[int, Answer] = {}
    requests = read_requests(items, range(len(items)), model, refused)
    size = model.ceiling.size
    if not requests.rows or (size is not None and size < len(requests.rows)):
        return None
    handler = model.entry.instance
    state = model.context.begin_ahead(requests.metas, requests.parts, _refuse_piece)
    # A request for an explanation or a description is handled separately, by the main thread.
    for idx in range(len(requests.rows)):
        if may_ask_explain(requests.metas[idx]) and any(
            model.context.get_request_header(idx, name) == "True"
            for name in ("explain", "describe")
        ):
            return None
    steps, laps = _Steps(handler, device_state), step_times.begin()
    try:
        steps.prepare(list(requests.rows))
    except OutOfTurn:
        return None
    return PreparedBatch(requests, refused, state, steps.finish, laps)


class _Steps:
    """The steps of one batch, which two threads run."""

    def __init__(self, handler: Any, device_state: _DeviceState) -> None:
        self._handler = handler
        self._device_state = device_state
        self._prepared: Any = None
        self._error: BaseException | None = None
        self._mark: Any = None
        self._preprocess_s = 0.0

    def prepare(self, rows: list[Any]) -> None:
        """Run `preprocess`, and keep its result or error."""
        start = time.perf_counter()
        try:
            self._prepared = self._handler.preprocess(rows)
        except OutOfTurn:
            raise
        # The error is raised again when the batch is answered.
        except BaseException as error:
            self._error = error
        self._mark = self._device_state.mark()
        self._preprocess_s = time.perf_counter() - start

    def finish(self) -> Any:
        """Run `inference` and `postprocess`, or raise the error of `preprocess`."""
        error, prepared, self._error, self._prepared = self._error, self._prepared, None, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Otherwise the error and this frame would refer to each other.
        start = time.perf_counter()
        self._device_state.wait_for(self._mark)
        try:
            output = self._handler.postprocess(self._handler.inference(prepared))
        finally:
            # This waits for the GPU before `prepared` is freed, since the other thread's stream may
            # reuse its memory at once.
            self._device_state.finish()
        metrics = self._handler.context.metrics
        if metrics is not None:
            seconds = self._preprocess_s + time.perf_counter() - start
            metrics.add_time("HandlerTime", round(seconds * 1000, 2), None, "ms")
        return output


class _DeviceState:
    """The device settings of the preparing thread; on the CPU, only torch's settings."""

    def __init__(self) -> None:
        self._apply_settings = capture_torch_settings()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the state to the preparing thread while the context is open."""
        self._apply_settings()
        yield

    def mark(self) -> Any:
        """Mark the end of the work that the preparing thread has queued on the device."""

    def wait_for(self, mark: Any) -> None:
        """Let the next work of this thread on the device start after the mark."""

    def finish(self) -> None:
        """Wait for this thread's work on the device."""


class _CudaState(_DeviceState):
    """A CUDA stream of its own, so that the next batch's copies and kernels run concurrently."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._cuda = sys.modules["torch"].cuda
        self._stream = self._cuda.Stream(device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with super().entered(), self._cuda.device(self._device), self._cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait_for(self, mark: Any) -> None:
        self._cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        self._cuda.current_stream(self._device).synchronize()


def _is_cuda(handler: Any) -> bool:
    return getattr(getattr(handler, "device", None), "type", None) == "cuda"


def _refuse_piece(idx: int, headers: Buffer, body: Buffer) -> None:
    raise OutOfTurn(
        "a part of an answer cannot be sent before the batches that came earlier are answered"
    )
