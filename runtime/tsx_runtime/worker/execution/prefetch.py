"""The preparation of the next batch while the model runs this one.

One thread reads frames and preprocesses; the main thread runs the model. This is only for handlers
with three separate steps: those derived from `BaseHandler` without their own `handle`. Batches are
answered in their order. A batch that cannot be prepared ahead is handled in its turn, as without a
second thread.

`preprocess` must pass on everything by its result. If a handler leaves something on `self` for
`postprocess`, that finds the values of the next batch. A user's own `preprocess` is therefore run
ahead only if the model configures it (`overlapPreprocessing: true`). By default, it is done on CUDA
devices, where the CPU would wait for the GPU, with the `preprocess` of tsx's own handlers.
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
from tsx_runtime.worker.execution.micro_batching import is_handled_by_base, torch_state

logger = logging.getLogger("tsx.worker")


class OutOfTurn(RuntimeError):
    """The error of a `preprocess` that does what only the current batch may do."""


class ReadBatch(NamedTuple):
    """A batch that was read; `ahead` is None if it is prepared in its turn."""

    batch: int
    items: list[Item]
    ahead: PreparedBatch | None
    began: float | None  # the time of the preparation, by `time.monotonic`


def overlaps(model: ServedModel) -> bool:
    """Tell whether the steps of this model's handler may run side by side."""
    setting = model.context.model_yaml_config.get("overlapPreprocessing", "auto")
    handler = model.entry.instance
    if (
        model.cost is not None  # A batch may have to be cut before it is preprocessed.
        or setting is False
        or not model.alone
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
    channel: FrameSocket, model: ServedModel, on_other: Callable[..., None]
) -> Iterator[ReadBatch]:
    """Yield batches as they arrive, each prepared while the previous one is answered.

    It raises the errors of reading, and ends when the front end has closed. `on_other` gets all
    other frames.
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
        args=(channel, model, on_other, device_state, ready),
        name="tsx-prepare",
        daemon=True,
    )
    thread.start()
    while (waiting := ready.get()) is not None:
        if isinstance(waiting, BaseException):
            raise waiting
        yield waiting
        del waiting  # An idle worker keeps no body in memory.


def _read(
    channel: FrameSocket,
    model: ServedModel,
    on_other: Callable[..., None],
    device_state: _DeviceState,
    ready: queue.Queue[Any],
) -> None:
    try:
        with device_state.entered():
            while (frame := channel.read()) is not None:
                if frame.kind is not Kind.BATCH:
                    on_other(channel, frame)
                    continue
                items = copy_items(frame.items)
                batch, began = frame.batch, time.monotonic()
                del frame
                ahead = prepare(model, items, device_state)
                waiting = ReadBatch(batch, items, ahead, began if ahead else None)
                del ahead
                del items
                ready.put(waiting)
                del waiting
    # Any error that ends this thread ends the worker, which raises it.
    except BaseException as error:
        ready.put(error)
    else:
        ready.put(None)


def copy_items(items: Sequence[Item]) -> list[Item]:
    """Copy requests that wait, since the channel's buffer is reused meanwhile.

    A large body that came alone has its own memory and stays. The handler gets a copy that it may
    change in any case, since a batch that fails is read again.
    """
    return [
        (code, bytes(meta), memoryview(body) if isinstance(body, bytearray) else bytes(body))
        for code, meta, body in items
    ]


def prepare(
    model: ServedModel, items: Sequence[Item], device_state: _DeviceState
) -> PreparedBatch | None:
    """Run the first steps of a batch; their errors are raised in the batch's turn.

    Returns:
        None if the batch must be handled in its turn.
    """
    refused: dict[int, Answer] = {}
    requests = read_requests(items, range(len(items)), model, refused)
    size = model.ceiling.size
    if not requests.rows or (size is not None and size < len(requests.rows)):
        return None
    handler = model.entry.instance
    state = model.context.begin_ahead(requests.metas, requests.parts, _refuse_piece)
    # An explanation or a description is made in its turn, and alone.
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
    """The steps of one batch, split over two threads."""

    def __init__(self, handler: Any, device_state: _DeviceState) -> None:
        self._handler = handler
        self._device_state = device_state
        self._prepared: Any = None
        self._error: BaseException | None = None
        self._mark: Any = None
        self._seconds = 0.0

    def prepare(self, rows: list[Any]) -> None:
        """Run `preprocess`, and note its error."""
        start = time.perf_counter()
        try:
            self._prepared = self._handler.preprocess(rows)
        except OutOfTurn:
            raise
        # A user's error is raised again in the batch's turn.
        except BaseException as error:
            self._error = error
        self._mark = self._device_state.mark()
        self._seconds = time.perf_counter() - start

    def finish(self) -> Any:
        """Run `inference` and `postprocess`, or raise the error of `preprocess`."""
        error, prepared, self._error, self._prepared = self._error, self._prepared, None, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # It would hold this frame, which holds it.
        start = time.perf_counter()
        self._device_state.wait_for(self._mark)
        try:
            output = self._handler.postprocess(self._handler.inference(prepared))
        finally:
            # It waits before `prepared` is released, since the other thread's stream may then
            # reuse the memory.
            self._device_state.finish()
        metrics = self._handler.context.metrics
        if metrics is not None:
            seconds = self._seconds + time.perf_counter() - start
            metrics.add_time("HandlerTime", round(seconds * 1000, 2), None, "ms")
        return output


class _DeviceState:
    """The device state of the preparing thread; on the CPU, these are torch's settings."""

    def __init__(self) -> None:
        self._apply_settings = torch_state()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run with the state of the preparing thread."""
        self._apply_settings()
        yield

    def mark(self) -> Any:
        """Return the point on the device up to which work belongs to the prepared batch."""

    def wait_for(self, mark: Any) -> None:
        """Make this thread's work on the device start after the mark."""

    def finish(self) -> None:
        """Wait for this thread's work on the device."""


class _CudaState(_DeviceState):
    """A stream, so that copies and kernels of the next batch run beside those of the model."""

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
