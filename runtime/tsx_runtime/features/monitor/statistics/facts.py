"""Facts about one value: a number, a category, or those of a text, an image or an array."""

from __future__ import annotations

import base64
import io
import math
import unicodedata
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Facts = dict[str, float | str | None]
Vector = NDArray[np.float64]

MAX_NUMBER = 1e100  # A larger number, which is hardly a measurement, would overflow in sums.
MAX_CATEGORY_CHARS = 100
MAX_SCRIPT_CHARS = 2000  # characters of a text that are examined
MAX_PIXELS = 25_000_000  # Of a larger image, only the size is read.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # EPS, for one, would run a program.


def number_of(value: Any) -> float | None:
    """Return a number, or a text with one, as a float; None for others, NaN and infinity."""
    try:
        number = float(value) if isinstance(value, float | int | str) else MAX_NUMBER
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < MAX_NUMBER else None


def category_of(value: Any) -> str | None:
    """Return the category or class that a value names; None for an empty one or a structure.

    3 and 3.0 are one category; booleans are `true` and `false`.
    """
    if isinstance(value, str):
        return value[:MAX_CATEGORY_CHARS] or None
    if isinstance(value, bool):
        return "true" if value else "false"
    number = number_of(value)
    return None if number is None else f"{number:.12g}"


def text_facts(value: Any) -> Facts:
    """Return the length, the most frequent script and the share of digits of a text."""
    if not isinstance(value, str):
        return {}
    counts = Counter(value[:MAX_SCRIPT_CHARS])
    scripts = Counter({"none": 0})
    for character, count in counts.items():
        if character.isalpha():
            scripts[unicodedata.name(character, "other").partition(" ")[0].lower()] += count
    return {
        "length": float(len(value)),
        "script": max(scripts, key=scripts.__getitem__),
        "digits": sum(map(str.isdigit, counts.elements())) / max(1, counts.total()),
    }


def image_facts(value: Any) -> Facts:
    """Return facts about an image (bytes, or base64 in JSON) or about an array of numbers.

    Those of an image are width, height, brightness and contrast (from 0 to 1). Those of an array
    are mean, contrast (the standard deviation), minimum and maximum. Other values have none.
    """
    if (vector := vector_of(value)) is not None:
        values = (vector.mean(), vector.std(), vector.min(), vector.max())
        return dict(
            zip(("mean", "contrast", "minimum", "maximum"), map(float, values), strict=True)
        )
    facts: Facts = {}
    with suppress(Exception):  # A client's bytes: Pillow's decoders raise errors of many types.
        if isinstance(value, dict):
            value = value["b64"]  # KServe and TensorFlow Serving encode bytes like this.
        if isinstance(value, str):
            value = base64.b64decode(value.rpartition(",")[2])  # A data URL has a comma.
        image = Image.open(io.BytesIO(value), formats=FORMATS)
        facts |= zip(("width", "height"), map(float, image.size), strict=True)
        if math.prod(image.size) <= MAX_PIXELS:
            image.thumbnail((64, 64))
            pixels = np.asarray(image.convert("L")) / 255
            facts |= {"brightness": float(pixels.mean()), "contrast": float(pixels.std())}
    return facts


def vector_of(value: Any) -> Vector | None:
    """Return a list of numbers, at any depth, as a vector; None for other values."""
    try:
        vector = np.asarray(value if isinstance(value, list) else [], np.float64).ravel()
    except (ValueError, TypeError, OverflowError):
        return None
    return vector if len(vector) and (np.abs(vector) < MAX_NUMBER).all() else None


def cosine(vector: Vector, centre: Vector) -> float | None:
    """Return the cosine of the angle between two vectors, if it exists."""
    length = np.linalg.norm(vector) * np.linalg.norm(centre)
    return float(vector @ centre / length) if vector.shape == centre.shape and length else None
