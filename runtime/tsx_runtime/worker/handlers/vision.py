"""The base of image handlers: converts rows to a batch of tensors. Contract section 5.4."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError

from tsx_runtime.worker.exceptions import each_or_bad, field_names, form_advice, in_words
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.staging import stack_on_device
from tsx_runtime.worker.handlers.steps.image_processing import Transform
from tsx_runtime.worker.handlers.steps.timing import timed


class VisionHandler(BaseHandler):
    """A row's `data` or `body` is the bytes of an image, the same as base64 text, or nested lists
    of numbers.

    `image_processing` takes a Pillow image, in the mode in which the file has it, and gives a
    tensor; subclasses set it. A row that is no image is answered with 400 and named; the rest of
    the batch goes on without it.
    """

    image_processing: Transform
    input_kind = "image"

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels", True):
            Image.MAX_IMAGE_PIXELS = None

    @timed
    def preprocess(self, data: Any) -> Any:
        return self.collate(each_or_bad(lambda _, row: self._tensor(row), data, NotAnImage))

    def collate(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model takes, made of the images of a batch."""
        return stack_on_device(tensors, self.device)

    def _tensor(self, row: Any) -> torch.Tensor:
        value = _value_of(row)
        if not isinstance(value, list):
            return self._prepared(open_image(_bytes_of(value)))
        try:
            return torch.tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotAnImage(
                f"The list in the request is not an array of numbers: {error}"
            ) from error

    def _prepared(self, image: Image.Image) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self.image_processing(image)
        except (ValueError, OSError) as error:
            raise NotAnImage(
                f"The image ({image.width} x {image.height}, mode {image.mode}) cannot be prepared:"
                f" {error}"
            ) from error
        return tensor


class NotAnImage(ValueError):
    """A row that cannot be made a tensor; the message is for the client."""


def _value_of(row: Any) -> Any:
    """What is under `data` or `body`."""
    if not isinstance(row, dict):
        return row
    value = row.get("data")
    if value is None:
        value = row.get("body")
    if value is None:
        text = (
            "The request has no image: it needs a body, or a field named 'data'; it has"
            f" {field_names(row)}."
        )
        raise NotAnImage(text + form_advice(row))
    return value


def _bytes_of(value: Any) -> bytes | bytearray | memoryview:
    if isinstance(value, str):
        text = value.partition(",")[2] if value.startswith("data:") else value
        try:
            value = base64.b64decode(text)
        except ValueError as error:
            raise NotAnImage(f"The text in the request is not base64: {error}") from error
    if isinstance(value, bytes | bytearray | memoryview):
        if not value:
            raise NotAnImage("The request has an empty body, not an image.")
        return value
    raise NotAnImage(
        f"The request holds a {type(value).__name__}, not an image: send the bytes of an image"
        " file, or base64 text."
    )


def open_image(data: bytes | bytearray | memoryview) -> Image.Image:
    """Decoded, in its own mode. Raises `NotAnImage`."""
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise NotAnImage(
            f"The image is too large: {error} Set limit_max_image_pixels=false if you trust your"
            " clients."
        ) from error
    # a request's boundary: Pillow's decoders raise nearly anything on what they cannot read
    except Exception as error:
        start = bytes(data[:8]).hex(" ")
        # Pillow's text for an unknown format names an object in memory.
        why = "no known format" if isinstance(error, UnidentifiedImageError) else in_words(error)
        raise NotAnImage(
            f"The request's {len(data)} bytes, beginning {start}, are not a readable image: {why}"
        ) from error
    return image
