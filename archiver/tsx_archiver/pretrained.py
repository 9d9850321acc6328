"""What an archive of a Hugging Face directory holds: its files as they are, PEFT adapters, and a
request to try it with.
"""

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
TEXT, RATE = "tsx serves models that other people have trained.", 16_000


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
    """What to pack, and lines that say what was found.

    `source`: a directory's name, or `hf:ORG/NAME`. Raises ArchiveError.
    """
    if not (directory / CONFIG).is_file() and (directory / ADAPTER_CONFIG).is_file():
        kind, base = read_adapter("adapter", directory)
        raise CannotPack(
            f"{directory} is an adapter ({kind}) of {base}. Name that model, and add --adapter"
            f" NAME={directory}"
        )
    model = Pretrained(directory, list(_names(directory)))
    config = directory / DEFAULT_CONFIG if DEFAULT_CONFIG in model.names else None
    if config is not None and not task:
        from tsx_archiver.metadata.modelconfig import load_model_config  # here: it imports pydantic

        settings = load_model_config(config)[0].huggingface
        task = settings.task if settings else None
    chosen = model.task(task)
    files = {f"{DIRECTORY}/{each}": directory / each for each in model.needed}
    title = name or model_name_from(source.rpartition("/")[2])
    named = handler or (GENERATION_HANDLER if chosen == GENERATION else HANDLER)
    notes = [
        f"{source}: Hugging Face model, {model.architecture or 'no architecture named'}, task"
        f" {chosen}" + (" with a chat template" if model.has_chat_template else ""),
        *([f"revision {revision}"] if revision else []),
        f"name {title}, version {version or DEFAULT_VERSION}",
        f"handler {named}",
    ]
    pickles = model.pickles
    for label, place in (adapters or {}).items():
        kind, base = read_adapter(label, place)
        found = needed_files(_names(place), (), str(place))
        files |= {
            f"{DIRECTORY}/{ADAPTERS}/{label}/{each}": place / each
            for each in found
            if not each.endswith(".py")
        }
        pickles += [f"{label}/{each}" for each in found if each.endswith(".bin")]
        notes.append(f"adapter {label}: {kind} of {base}")
    if pickles:
        notes.append(
            f"note: {pickles[0]} is a pickle. Workers read nothing but weights from it, and refuse"
            " it if it holds more. Save the model again to get safetensors"
        )
    if model.code:
        notes.append(
            f"note: {model.code[0]} is code of the model's author. It runs only with"
            f" --trust-remote-code, or where the server's setting trust_remote_code names {title}"
        )
    facts = {
        "task": chosen,
        "architecture": model.architecture,
        "source": source,
        "revision": revision,
        "chat": model.has_chat_template,
        "adapters": list(adapters or ()),
    }
    spec = ArchiveSpec(
        model_name=title,
        version=version or DEFAULT_VERSION,
        handler=named,
        config_file=config,
        files=files,
        contents=_sample(chosen, model),
        extra_manifest={MANIFEST_KEY: {key: value for key, value in facts.items() if value}},
    )
    return spec, notes


def _names(directory: Path) -> Iterator[str]:
    """Of all files below, but for hidden folders."""
    for place, folders, files in os.walk(directory):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        yield from (
            (Path(place) / file).relative_to(directory).as_posix() for file in sorted(files)
        )


def _sample(task: str, model: Pretrained) -> dict[str, bytes]:
    """A request that any model of the task answers, the same each time."""
    if task in AUDIO_TASKS:
        return {f"{SAMPLES}/example.wav": _sound()}
    if task in (
        "image-classification",
        "image-segmentation",
        "object-detection",
        "depth-estimation",
    ):
        return {f"{SAMPLES}/example.png": gradient_png()}
    return {f"{SAMPLES}/{EXAMPLE}": json.dumps(_request(task, model)).encode()}


def _request(task: str, model: Pretrained) -> dict[str, Any]:
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
    picture = base64.b64encode(gradient_png()).decode()
    if task == "zero-shot-image-classification":
        return {"inputs": picture, "parameters": {"candidate_labels": labels}}
    if task == "image-text-to-text":
        content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
        asked: Any = (
            [{"role": "user", "content": content}]
            if model.has_chat_template
            else {"image": picture, "text": "What is this?"}
        )
        return {"inputs": asked, "parameters": {"max_new_tokens": 16, "do_sample": False}}
    return {"inputs": TEXT}


def gradient_png(side: int = 64) -> bytes:
    """A square with a gradient of each colour, made without a library for images."""
    rows = b"".join(
        b"\0" + bytes(part for x in range(side) for part in (x * 255 // side, y * 255 // side, 128))
        for y in range(side)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def _sound() -> bytes:
    """A second of a tone of 250 Hz."""
    sound = io.BytesIO()
    with wave.open(sound, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(
            b"".join(
                int(8000 * (abs(step % 64 - 32) / 16 - 1)).to_bytes(2, "little", signed=True)
                for step in range(RATE)
            )
        )
    return sound.getvalue()
