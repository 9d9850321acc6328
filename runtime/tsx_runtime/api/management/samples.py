"""Example inputs of a model: samples or warm-up requests in its archive, or generated inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver.pretrained import gradient_png
from tsx_runtime.api.headers import is_header
from tsx_runtime.api.management.service import ask_handler
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.errors import TsxError
from tsx_runtime.recordings import SUFFIX, NotARecording, read
from tsx_runtime.shared.content_types import guess_content_type
from tsx_runtime.shared.example_requests import OIP_TYPES, example_body, read_example

SAMPLES = "samples"  # directory in an archive for example inputs
MAX_SAMPLE_BYTES = 32 << 20
MAX_SAMPLES = 200
# Handlers that take JSON lists of numbers.
NUMBER_HANDLERS = ("", "base_handler", "torchscript_handler")
IMAGE_SIDE_PX = 224  # size of a generated image
SAMPLE_TEXT = b"The quick brown fox jumps over the lazy dog."


class SampleInput(NamedTuple):
    source: str  # its path in the archive, or "generated"
    content_type: str
    body: bytes


def input_of(version: ModelVersion) -> str | None:
    """Return the handler's kind of input: image, text, json, file, chat, or None if unknown.

    Workers report the kind. It is also known for some built-in handlers.
    """
    kind = next((worker.input for worker in version.workers if worker.input), None)
    return kind or ("json" if version.handler in NUMBER_HANDLERS else None)


def samples_of(version: ModelVersion) -> list[tuple[Path, int]]:
    """Return an archive's samples with their sizes; links out of the folder are skipped."""
    folder = version.archive.directory / SAMPLES
    resolved_folder = folder.resolve()
    try:
        files = [
            path
            for path in sorted(folder.iterdir())
            if path.is_file() and not path.name.startswith(".")
        ]
        files_with_size = [
            (path, path.stat().st_size)
            for path in files
            if path.resolve().parent == resolved_folder
        ]
    except (FileNotFoundError, NotADirectoryError):  # No samples, or the model is unregistered.
        return []
    return [(path, size) for path, size in files_with_size if size <= MAX_SAMPLE_BYTES][
        :MAX_SAMPLES
    ]


def sample_of(version: ModelVersion) -> SampleInput | None:
    """Return the first sample or warm-up request, or else a generated input; this reads files."""
    for path, _ in samples_of(version):
        with suppress(FileNotFoundError):  # The model may be unregistered meanwhile.
            body = path.read_bytes()
            return SampleInput(f"{SAMPLES}/{path.name}", guess_content_type(path.name, body), body)
    return (
        next(_warm_up_requests(version), None)
        or _example_of_signature(version)
        or _generated(input_of(version))
    )


def has_example(version: ModelVersion) -> bool:
    """Tell whether the handler describes a request for its model."""
    return any(worker.example for worker in version.workers)


async def example_of(version: ModelVersion) -> SampleInput | None:
    """Return the request that the handler describes, or None without a ready worker."""
    if example := _example_of_signature(version):
        return example
    inputs = read_example(await _handler_description(version))
    return (
        SampleInput(
            "generated",
            "application/json",
            json.dumps(example_body(inputs, version.envelope)).encode(),
        )
        if inputs
        else None
    )


async def tensors_of(version: ModelVersion) -> list[tuple[str, str, list[int]]]:
    """Return the inputs that the handler describes.

    Returns:
        Name, datatype of the Open Inference Protocol and shape of a row. A size of -1 is free.
    """
    description = await _handler_description(version)
    try:
        inputs = [
            (str(tensor["name"]), OIP_TYPES.get(tensor["datatype"], "FP32"), tensor["shape"] or [])
            for tensor in description["inputs"]
        ]
        return [
            (name, kind, [-1 if size is None else int(size) for size in shape])
            for name, kind, shape in inputs
        ]
    except (KeyError, TypeError, ValueError):
        return []


async def _handler_description(version: ModelVersion) -> Any:
    """Return the description of a handler with tensors, or None without a ready worker."""
    try:
        return await ask_handler(version) if has_example(version) else None
    except TsxError:
        return None


def _warm_up_requests(version: ModelVersion) -> Iterator[SampleInput]:
    root = version.archive.directory.resolve()
    for entry in version.config.warmup or ():
        file = (root / entry.file).resolve()
        try:
            if (
                not file.is_relative_to(root)
                or not file.is_file()
                or file.stat().st_size > MAX_SAMPLE_BYTES
            ):
                continue
            if not file.name.endswith(SUFFIX):
                body = file.read_bytes()
                yield SampleInput(
                    entry.file, _content_type(entry.content_type, file.name, body), body
                )
                continue
            for recorded in read(file):
                headers = {name.lower(): value for name, value in recorded.headers}
                yield SampleInput(
                    entry.file,
                    _content_type(headers.get("content-type"), "", recorded.body),
                    recorded.body,
                )
        except (OSError, NotARecording):
            continue


def _content_type(archive_type: str | None, name: str, body: bytes) -> str:
    """Return the archive's content type if it is valid as a header, else guess it."""
    if (
        archive_type
        and archive_type.isascii()
        and is_header(b"content-type", archive_type.encode())
    ):
        return archive_type
    return guess_content_type(name, body)


def _example_of_signature(version: ModelVersion) -> SampleInput | None:
    if version.signature is None or version.signature.example is None:
        return None
    body = json.dumps(version.signature.example, ensure_ascii=False).encode()
    return SampleInput("generated", "application/json", body)


def _generated(kind: str | None) -> SampleInput | None:
    if kind == "image":
        return SampleInput("generated", "image/png", gradient_png(IMAGE_SIDE_PX))
    return (
        SampleInput("generated", "text/plain; charset=utf-8", SAMPLE_TEXT)
        if kind == "text"
        else None
    )
