"""The archive of a Hugging Face model: its files, PEFT adapters, and an example request."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import wave
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import (
    ADAPTER_CONFIG,
    ADAPTERS,
    AUDIO_TASKS,
    CONFIG,
    DIRECTORY,
    GENERATION,
    GENERATION_HANDLER,
    HANDLER,
    MANIFEST_KEY,
    Pretrained,
    needed_files,
    read_adapter,
)
from tsx_archiver.names import DEFAULT_VERSION, model_name_from
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_archiver.packing import ArchiveSpec

SAMPLES, EXAMPLE = "samples", "example.json"
TEXT = "tsx serves models that other people have trained."
SAMPLE_RATE = 16_000  # Hz


def pretrained_spec(
    directory: Path,
    *,
    source: str,
    revision: str | None = None,
    name: str | None = None,
    version: str | None = None,
    handler: str | None = None,
    task: str | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> tuple[ArchiveSpec, list[str]]:
    """Describe an archive of a Hugging Face model, and return notes for the user with it.

    Args:
        directory: The directory of the model.
        source: The name of the directory, or `hf:ORG/NAME`.
        revision: The revision on the Hugging Face Hub.
        name: The name of the model; the default comes from `source`.
        version: The version of the model.
        handler: The handler; the default depends on the task.
        task: The task; the default comes from the model.
        adapters: Directories of PEFT adapters by name.

    Raises:
        ArchiveError: The directory does not contain a model that can be served.
    """
    if not (directory / CONFIG).is_file() and (directory / ADAPTER_CONFIG).is_file():
        kind, base = read_adapter("adapter", directory)
        raise CannotPack(
            f"{directory} is an adapter ({kind}) of {base}. Name that model, and add --adapter"
            f" NAME={directory}"
        )
    model = Pretrained(directory, list(_file_names(directory)))
    config = directory / DEFAULT_CONFIG if DEFAULT_CONFIG in model.names else None
    if config is not None and not task:
        # This module imports pydantic, which is slow.
        from tsx_archiver.metadata.modelconfig import load_model_config

        settings = load_model_config(config)[0].huggingface
        task = settings.task if settings else None
    chosen_task = model.task(task)
    files = {f"{DIRECTORY}/{file}": directory / file for file in model.needed}
    model_name = name or model_name_from(source.rpartition("/")[2])
    handler = handler or (GENERATION_HANDLER if chosen_task == GENERATION else HANDLER)
    notes = [
        f"{source}: Hugging Face model, {model.architecture or 'no architecture named'}, task"
        f" {chosen_task}" + (" with a chat template" if model.has_chat_template else ""),
        *([f"revision {revision}"] if revision else []),
        f"name {model_name}, version {version or DEFAULT_VERSION}",
        f"handler {handler}",
    ]
    pickles = model.pickles
    for label, folder in (adapters or {}).items():
        kind, base = read_adapter(label, folder)
        needed = needed_files(_file_names(folder), (), str(folder))
        files |= {
            f"{DIRECTORY}/{ADAPTERS}/{label}/{file}": folder / file
            for file in needed
            if not file.endswith(".py")
        }
        pickles += [f"{label}/{file}" for file in needed if file.endswith(".bin")]
        notes.append(f"adapter {label}: {kind} of {base}")
    if pickles:
        notes.append(
            f"note: {pickles[0]} is a pickle. Workers read nothing but weights from it, and refuse"
            " it if it holds more. Save the model again to get safetensors"
        )
    if model.code:
        notes.append(
            f"note: {model.code[0]} is code of the model's author. It runs only with"
            " --trust-remote-code, or where the server's setting trust_remote_code names"
            f" {model_name}"
        )
    origin = {
        "task": chosen_task,
        "architecture": model.architecture,
        "source": source,
        "revision": revision,
        "chat": model.has_chat_template,
        "adapters": list(adapters or ()),
    }
    spec = ArchiveSpec(
        model_name=model_name,
        version=version or DEFAULT_VERSION,
        handler=handler,
        config_file=config,
        files=files,
        contents=_example_files(chosen_task, model),
        extra_manifest={MANIFEST_KEY: {key: value for key, value in origin.items() if value}},
    )
    return spec, notes


def _file_names(directory: Path) -> Iterator[str]:
    """Yield the names of all files below a directory, without hidden folders."""
    for path, folders, files in os.walk(directory):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        yield from ((Path(path) / file).relative_to(directory).as_posix() for file in sorted(files))


def _example_files(task: str, model: Pretrained) -> dict[str, bytes]:
    """Return a file with an example request, which any model of the task can process."""
    if task in AUDIO_TASKS:
        return {f"{SAMPLES}/example.wav": _tone_wav()}
    if task in (
        "image-classification",
        "image-segmentation",
        "object-detection",
        "depth-estimation",
    ):
        return {f"{SAMPLES}/example.png": gradient_png()}
    return {f"{SAMPLES}/{EXAMPLE}": json.dumps(_example_request(task, model)).encode()}


def _example_request(task: str, model: Pretrained) -> dict[str, Any]:
    labels: Sequence[str] = ("software", "cooking")
    question = {"question": "What does tsx serve?", "context": TEXT}
    if task == "question-answering":
        return {"inputs": question}
    if task == "fill-mask":
        return {"inputs": f"tsx serves {model.mask} that other people have trained."}
    if task == "zero-shot-classification":
        return {"inputs": TEXT, "parameters": {"candidate_labels": labels}}
    if task == "sentence-similarity":
        return {
            "inputs": {
                "source_sentence": TEXT,
                "sentences": ["A server of models.", "Bread is baked in an oven."],
            }
        }
    if task == "text-ranking":
        return {
            "inputs": {"query": question["question"], "texts": [TEXT, "Bread is baked in an oven."]}
        }
    if task == GENERATION:
        return {
            "inputs": "Once upon a time",
            "parameters": {"max_new_tokens": 16, "do_sample": False},
        }
    image = base64.b64encode(gradient_png()).decode()
    if task == "zero-shot-image-classification":
        return {"inputs": image, "parameters": {"candidate_labels": labels}}
    if task == "image-text-to-text":
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]
        message: Any = (
            [{"role": "user", "content": content}]
            if model.has_chat_template
            else {"image": image, "text": "What is this?"}
        )
        return {"inputs": message, "parameters": {"max_new_tokens": 16, "do_sample": False}}
    return {"inputs": TEXT}


def gradient_png(side: int = 64) -> bytes:
    """Return a square image with a gradient of each colour, made without an image library."""
    rows = b"".join(
        b"\0" + bytes(part for x in range(side) for part in (x * 255 // side, y * 255 // side, 128))
        for y in range(side)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def _tone_wav() -> bytes:
    """Return a WAV file with a tone of 250 Hz that lasts one second."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        out.writeframes(
            b"".join(
                int(8000 * (abs(step % 64 - 32) / 16 - 1)).to_bytes(2, "little", signed=True)
                for step in range(SAMPLE_RATE)
            )
        )
    return buffer.getvalue()
