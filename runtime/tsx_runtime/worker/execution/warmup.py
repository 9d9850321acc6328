"""Warm-up requests (`warmup` in model-config.yaml), sent to a model before it counts as loaded.

Thus kernels are chosen, graphs compiled and caches filled before the first client's request.
"""

from __future__ import annotations

import itertools
import logging
import mimetypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tsx_runtime import wire
from tsx_runtime.recordings import SUFFIX, NotARecording, read
from tsx_runtime.wire import Item
from tsx_runtime.worker.codecs.responses import COUNT_MISMATCH_MESSAGE, NOT_A_LIST_MESSAGE, Answer
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.execution.batch import ServedModel, answer_batch, send_nowhere
from tsx_runtime.worker.execution.loop import find_loop
from tsx_runtime.worker.handler_api.loader import own_file

if TYPE_CHECKING:
    from tsx_archiver import ModelConfig, WarmUp

MAX_RECORDED_REQUESTS = 100  # requests of a recording without a `count`

logger = logging.getLogger("tsx.worker")


def warm_up(
    model: ServedModel,
    config: ModelConfig,
    directory: Path,
    batch_size: int,
    sequence: tuple[str, str, str] | None,
) -> None:
    """Send the warm-up requests of a model.

    Args:
        model: The model.
        config: The model's configuration.
        directory: The directory of the model.
        batch_size: The size of a full batch.
        sequence: For a stateful model, the names of the headers for the id, the start and the end
            of a sequence.

    Raises:
        LoadError: A required request fails.
    """
    start, count = time.monotonic(), 0
    numbers = itertools.count(1)
    for entry in config.warmup or ():
        try:
            for items in _make_batches(entry, directory, batch_size, sequence, numbers):
                count += len(items)
                _check_answers(entry, _answer_requests(model, items))
        except (OSError, NotARecording) as error:
            _report_failure(
                entry, f"{entry.file} cannot be read: {getattr(error, 'strerror', None) or error}"
            )
    if config.warmup:
        # Metrics must not count these requests, which no client has sent.
        model.metrics.pending.take()
        logger.info("warmed up by %d requests in %.2f s", count, time.monotonic() - start)


def _check_answers(entry: WarmUp, answers: list[Answer]) -> None:
    failed_answer = next(((status, body) for status, _, body in answers if status >= 400), None)
    if failed_answer is not None:
        text = bytes(failed_answer[1])[:1000].decode(errors="replace").strip()
        _report_failure(
            entry,
            f"a request of {entry.file} was answered with {failed_answer[0]}: {text}",
            is_broken=NOT_A_LIST_MESSAGE in text or COUNT_MISMATCH_MESSAGE in text,
        )


def _report_failure(entry: WarmUp, reason: str, *, is_broken: bool = False) -> None:
    """Log a failure, or raise LoadError if the entry is strict or the model is broken.

    A broken model cannot answer any request of a batch of this size.
    """
    if entry.strict or is_broken:
        raise LoadError(f"The warm-up of the model failed: {reason}")
    logger.warning(
        "warm-up: %s; the model is served anyway (set `strict: true` to refuse it)", reason
    )


def _make_batches(
    entry: WarmUp,
    directory: Path,
    batch_size: int,
    sequence: tuple[str, str, str] | None,
    numbers: Iterator[int],
) -> Iterator[list[Item]]:
    """Yield batches of the size that is served.

    A file without a `count` is sent once as a single request, and then as one full batch.
    """
    file = own_file(directory / entry.file, directory)
    if file.name.endswith(SUFFIX):
        recordings = itertools.islice(read(file), entry.count or MAX_RECORDED_REQUESTS)
        requests = (
            (recording.query, recording.headers, recording.body) for recording in recordings
        )
        while batch := list(itertools.islice(requests, batch_size)):
            yield [
                _make_request(next(numbers), query, dict(headers), body, sequence)
                for query, headers, body in batch
            ]
        return
    body = file.read_bytes()
    kind = entry.content_type or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    headers = {"content-type": kind, **dict(entry.headers or {})}
    remaining = entry.count or batch_size
    if entry.count is None and batch_size > 1:
        yield [_make_request(next(numbers), "", headers, body, sequence)]
    while remaining > 0:
        yield [
            _make_request(next(numbers), "", headers, body, sequence)
            for _ in range(min(remaining, batch_size))
        ]
        remaining -= batch_size


def _make_request(
    number: int,
    query: str,
    headers: dict[str, str],
    body: bytes,
    sequence: tuple[str, str, str] | None,
) -> Item:
    id = f"warm-up-{number}"
    if sequence is not None:
        sequence_headers = dict(zip(sequence, (id, "true", "true"), strict=True))
        lower_names = {name.lower() for name in headers}
        headers = headers | {
            name: value
            for name, value in sequence_headers.items()
            if name.lower() not in lower_names
        }
    block = [
        (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
        for name, value in headers.items()
    ]
    return 0, wire.request_meta(id, query.encode("latin-1", "replace"), block), body


def _answer_requests(model: ServedModel, items: list[Item]) -> list[Answer]:
    if model.mode == "batch":
        outcome = answer_batch(model, items, send_nowhere)
    else:
        outcome = find_loop(model.mode).answer(model, items)
    if outcome.device_lost:
        raise LoadError(
            "The device stopped responding to this process during the warm-up of the model."
        )
    return outcome.answers
