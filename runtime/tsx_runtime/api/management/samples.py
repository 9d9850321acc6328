"""An input for trying a model: a sample or a warm-up request of its archive, else one that is
generated for what its handler takes.
"""

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

SAMPLES = "samples"  # the directory of an archive that holds inputs for trying it
LONGEST_SAMPLE = 32 << 20  # bytes
MOST_LISTED = 200
NUMBERS = ("", "base_handler", "torchscript_handler")  # handlers that take JSON lists of numbers
SIDE = 224  # pixels of a generated image
TEXT = b"The quick brown fox jumps over the lazy dog."


class SampleInput(NamedTuple):
    source: str  # its path in the archive, or that it is generated
    content_type: str
    body: bytes


def input_of(version: ModelVersion) -> str | None:
    """image, text, json, file or chat: what its handler takes, as its workers say, or what tsx's
    own handlers are known to take.
    """
    kind = next((worker.input for worker in version.workers if worker.input), None)
    return kind or ("json" if version.handler in NUMBERS else None)


def samples_of(version: ModelVersion) -> list[tuple[Path, int]]:
    """The files that its archive brings along for trying it, with their sizes; nothing that lies
    elsewhere, wherever a link may point.
    """
    folder = version.archive.directory / SAMPLES
    inside = folder.resolve()
    try:
        files = [
            path
            for path in sorted(folder.iterdir())
            if path.is_file() and not path.name.startswith(".")
        ]
        found = [(path, path.stat().st_size) for path in files if path.resolve().parent == inside]
    except (FileNotFoundError, NotADirectoryError):  # it brings none, or is being unregistered
        return []
    return [(path, size) for path, size in found if size <= LONGEST_SAMPLE][:MOST_LISTED]


def sample_of(version: ModelVersion) -> SampleInput | None:
    """The first that there is; None where there is none, and what the handler takes is not known.
    It reads files.
    """
    for path, _ in samples_of(version):
        with suppress(FileNotFoundError):  # it is being unregistered
            body = path.read_bytes()
            return SampleInput(f"{SAMPLES}/{path.name}", guess_content_type(path.name, body), body)
    return next(_warm_up_requests(version), None) or _generated(input_of(version))


def has_example(version: ModelVersion) -> bool:
    """Whether its handler describes a request that its model takes."""
    return any(worker.example for worker in version.workers)


async def example_of(version: ModelVersion) -> SampleInput | None:
    """That request; None where it is not known, or no worker is ready to tell."""
    inputs = read_example(await _described(version))
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
    """Name, datatype of the Open Inference Protocol and shape of a row of each input that its
    handler describes. A size of -1 is free.
    """
    described = await _described(version)
    try:
        given = [
            (str(each["name"]), OIP_TYPES.get(each["datatype"], "FP32"), each["shape"] or [])
            for each in described["inputs"]
        ]
        return [
            (name, kind, [-1 if size is None else int(size) for size in shape])
            for name, kind, shape in given
        ]
    except (KeyError, TypeError, ValueError):
        return []


async def _described(version: ModelVersion) -> Any:
    """What its handler says of itself, if it takes tensors and a worker is ready to tell."""
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
                or file.stat().st_size > LONGEST_SAMPLE
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


def _content_type(given: str | None, name: str, body: bytes) -> str:
    """What an archive says, if a header can hold it: it becomes one of the answer."""
    if given and given.isascii() and is_header(b"content-type", given.encode()):
        return given
    return guess_content_type(name, body)


def _generated(kind: str | None) -> SampleInput | None:
    if kind == "image":
        return SampleInput("generated", "image/png", gradient_png(SIDE))
    return SampleInput("generated", "text/plain; charset=utf-8", TEXT) if kind == "text" else None
