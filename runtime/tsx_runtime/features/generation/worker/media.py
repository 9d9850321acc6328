"""The images and sounds of chats: their conversion by a model's processor, and their embeddings.

The language part of a model reads embeddings, of which those of placeholder tokens come from images
and sounds. The model itself computes them all, once for each prompt. Steps then read parts of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from hashlib import sha256
from inspect import signature
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from PIL import Image

from tsx_runtime.features.generation.worker.interface import Media, Prompt
from tsx_runtime.features.generation.worker.media_files import (
    ImageReader,
    SoundReader,
    UrlSettings,
    check_soundfile,
    fetch,
    file_bytes,
)
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.exceptions import InvalidInput, LoadError, describe_error

Kind: TypeAlias = Literal["image", "audio"]
# The inputs of the language part in this context, if they are asked for.
_captured_inputs: ContextVar[dict[str, Any] | None] = ContextVar("_captured_inputs", default=None)


class MediaFile(NamedTuple):
    """A file of a chat; `field` is its place in the request."""

    kind: Kind
    data: bytes
    field: str


class MediaProcessor:
    """The processor of a model that reads images or sounds in chats."""

    def __init__(self, processor: Any, urls: UrlSettings) -> None:
        """Create the processor.

        Raises:
            LoadError: The model reads sounds, and soundfile is missing.
        """
        self.processor = processor
        self._urls = urls
        self._lock = threading.Lock()  # Decoded images are large, so one chat has them at a time.
        extractor = getattr(processor, "feature_extractor", None)
        self._rate = int(getattr(extractor, "sampling_rate", 0))
        # A black image and a silent sound, for the trial of a model.
        self._samples: dict[Kind, Any] = {}
        if getattr(processor, "image_processor", None) is not None:
            self._samples["image"] = Image.new("RGB", (64, 64))
        if self._rate:
            check_soundfile()
            self._samples["audio"] = torch.zeros(self._rate).numpy()

    def check(self, model: Any) -> None:
        """Try the model with an image and a sound.

        Raises:
            LoadError: The model's chats cannot have images or sounds.
        """
        if not self._samples:
            raise LoadError("Its processor reads neither images nor sounds.")
        try:
            for kind, sample in self._samples.items():
                parts = [{"type": kind, kind: ""}, {"type": "text", "text": "What is it?"}]
                text = self.processor.apply_chat_template(
                    [{"role": "user", "content": parts}], add_generation_prompt=True
                )
                embed_prompt(model, *self._process(text, {kind: [sample]}))
        # Models, processors and templates may raise any error.
        except Exception as error:
            raise LoadError(f"{describe_error(error).rstrip('.')}.") from error

    def read(self, kind: Kind, value: str, field: str) -> MediaFile:
        """Read a file from base64, a data URL or an allowed URL.

        Raises:
            RefusedField: The model does not read such files, or the file cannot be read.
        """
        if kind not in self._samples:
            raise no_media_error(kind, field)
        with _name_field(field):
            data = fetch(value, self._urls) if "://" in value[:12] else file_bytes(value, kind)
        return MediaFile(kind, data, field)

    def encode(self, text: str, files: Sequence[MediaFile]) -> Prompt:
        """Encode a rendered chat with its files.

        Raises:
            RefusedField: A file is no image or sound, or is too large.
            InvalidInput: The text does not fit the files.
        """
        readers: dict[Kind, Callable[[Any], Any]] = {
            "image": ImageReader(),
            "audio": SoundReader(self._rate),
        }
        decoded: dict[Kind, list[Any]] = {}
        # Chats of text may be read on the event loop, so they do not wait.
        with self._lock if files else nullcontext():
            for kind, data, field in files:
                with _name_field(field):
                    decoded.setdefault(kind, []).append(readers[kind](data))
            try:
                token_ids, features = self._process(text, decoded)
            # The boundary of a request: the processor reads the client's files and text.
            except Exception as error:
                raise InvalidInput(
                    f"The model's processor refuses this chat: {describe_error(error)}"
                ) from error
        if not files:
            return Prompt(token_ids)
        digest = sha256(b"".join(sha256(file.data).digest() for file in files)).digest()
        return Prompt(token_ids, Media(features, digest))

    def _process(
        self, text: str, media: Mapping[Kind, list[Any]]
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens and the other inputs of the model."""
        options: dict[str, Any] = {}
        bos = self.processor.tokenizer.bos_token
        # Transformers' `apply_chat_template` adds no second beginning either.
        if bos and text.startswith(bos):
            options["add_special_tokens"] = False
        if "image" in media:
            options["images"] = [media["image"]]
        if "audio" in media:
            options["audio"] = media["audio"]
            # By default, some processors cut long sounds.
            options["audio_kwargs"] = {"sampling_rate": self._rate, "truncation": False}
        features = dict(self.processor(text=[text], return_tensors="pt", **options))
        return features.pop("input_ids")[0].tolist(), features


@contextmanager
def _name_field(field: str) -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise RefusedField(error.message, field, code="invalid_value") from error


def no_media_error(kind: Kind, field: str) -> RefusedField:
    return RefusedField(
        f"The field '{field}' is an {kind} file, which this model does not read. Send the request"
        " without it, or to another model.",
        field,
        code="unsupported_parameter",
    )


class SequenceEmbeddings:
    """The embeddings of a sequence's prompt, of shape (tokens, hidden size), until it ends."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows: torch.Tensor | None = rows

    # transformers copies the arguments when the sequence loses its cache.
    def __deepcopy__(self, memo: Any) -> SequenceEmbeddings:
        return self


class _InputsCaptured(Exception):
    """The inputs of the language part are known, so it need not run."""


def _capture_inputs(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    inputs = _captured_inputs.get()
    if inputs is not None:
        inputs.update(kwargs)
        raise _InputsCaptured


def capture_language_inputs(model: Any) -> None:
    """Prepare a model for `embed_prompt`, once."""
    model.get_decoder().register_forward_pre_hook(_capture_inputs, with_kwargs=True)


def embed_prompt(model: Any, token_ids: Sequence[int], features: Mapping[str, Any]) -> torch.Tensor:
    """Return the embeddings of a prompt with its media, of shape (tokens, hidden size).

    The model merges the media itself, up to the call of its language part.

    Raises:
        InvalidInput: The tokens do not fit the media, or the language part needs more than
            embeddings.
    """
    from transformers import BatchFeature  # an extra

    inputs = BatchFeature(dict(features)).to(model.device, dtype=model.dtype)
    # Some tokenizers return these for every model.
    if "token_type_ids" not in signature(model.forward).parameters:
        inputs.pop("token_type_ids", None)
    captured: dict[str, Any] = {}
    token = _captured_inputs.set(captured)
    try:
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=model.device)
            model(input_ids=ids, use_cache=False, **inputs)
    except _InputsCaptured:
        pass
    except ValueError as error:
        raise InvalidInput(
            f"The chat does not fit its images and sounds: {describe_error(error)}"
        ) from error
    finally:
        _captured_inputs.reset(token)
    fault = _language_fault(captured, len(token_ids))
    if fault is not None:
        raise InvalidInput(f"The model's language part has {fault}, which is not served here.")
    rows: torch.Tensor = captured["inputs_embeds"][0]
    if rows.device.type != "cpu":  # Steps run on another stream.
        torch.get_device_module(rows.device).synchronize()
    return rows


def _language_fault(inputs: Mapping[str, Any], length: int) -> str | None:
    """Explain what the language part needs beside embeddings and causal attention, if anything."""
    names = ("inputs_embeds", "position_ids", "attention_mask")
    embeddings, positions, mask = map(inputs.get, names)
    if embeddings is None or embeddings.shape[:2] != (1, length):
        return "inputs of another form"
    if positions is not None and positions.tolist() != [list(range(length))]:
        return "positions of its own"
    if mask is not None and not (
        isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool(mask.all())
    ):
        return "attention that is not causal"
    tensors = [
        name
        for name, value in inputs.items()
        if name not in names and isinstance(value, torch.Tensor | list)
    ]
    return f"further inputs ({', '.join(sorted(tensors))})" if tensors else None
