"""The base class of image handlers: the conversion of requests to a batch of tensors."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError

from tsx_runtime.worker.exceptions import describe_error, form_advice, map_rows, quote_field_names
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.staging import stack_on_device
from tsx_runtime.worker.handlers.steps.image_processing import Transform
from tsx_runtime.worker.handlers.steps.timing import timed


class VisionHandler(BaseHandler):
    """A handler that takes images.

    The `data` or `body` of a request is the bytes of an image file, their base64 text, or nested
    lists of numbers. A request without an image gets the status 400, and the others continue.

    Attributes:
        image_processing: Converts a Pillow image, in the mode of its file, to a tensor.
            Subclasses set it.
    """

    image_processing: Transform
    input_kind = "image"

    def initialize(self, context: Context) -> None:
        """Load the model, and apply `limit_max_image_pixels`.

        Raises:
            LoadError: The model cannot be loaded; the message says what to do.
        """
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels", True):
            Image.MAX_IMAGE_PIXELS = None

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return the images of the requests, joined by `collate`.

        Nested lists become float32 tensors without further processing.

        Raises:
            BadRows: Some requests hold no image.
        """
        return self.collate(map_rows(lambda _, row: self._tensor(row), data, NotAnImage))

    def collate(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the images of a batch as input of the model.

        Args:
            tensors: An image each, all of one shape, such as (3, height, width).

        Returns:
            A tensor on the device with the batch as its first dimension.
        """
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
    """A row that cannot be converted to a tensor; the message is for the client."""


def _value_of(row: Any) -> Any:
    """Return the value under `data` or `body`."""
    if not isinstance(row, dict):
        return row
    value = row.get("data")
    if value is None:
        value = row.get("body")
    if value is None:
        text = (
            "The request has no image: it needs a body, or a field named 'data'; it has"
            f" {quote_field_names(row)}."
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
    """Decode an image, in the mode of its file.

    Raises:
        NotAnImage: Pillow cannot read the bytes, or the image is too large.
    """
    try:
        image = Image.open(io.BytesIO(data))
        if image.format == "EPS":
            raise ValueError("EPS is a program, which Ghostscript would run")
        image.load()
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise NotAnImage(
            f"The image is too large: {error} Set limit_max_image_pixels=false if you trust your"
            " clients."
        ) from error
    # The boundary of a request: Pillow's decoders raise nearly anything.
    except Exception as error:
        start = bytes(data[:8]).hex(" ")
        # Pillow's text for an unknown format names an object in memory.
        reason = (
            "no known format"
            if isinstance(error, UnidentifiedImageError)
            else describe_error(error)
        )
        raise NotAnImage(
            f"The request's {len(data)} bytes, beginning {start}, are not a readable image:"
            f" {reason}"
        ) from error
    return image
