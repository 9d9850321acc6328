"""Facts about one value: a number, a category, or those of a text, an image or an array."""

from __future__ import annotations

import base64
import io
import unicodedata
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageStat

Facts = dict[str, float | str | None]
Vector = NDArray[np.float64]

MAX_NUMBER = 1e100  # A larger number, which is hardly a measurement, would overflow in sums.
MAX_CATEGORY_CHARS = 60
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
    if number is None:
        return None
    # An id has more digits than a measurement.
    return f"{number:.12g}" if isinstance(value, float) else str(value)[:MAX_CATEGORY_CHARS]


def text_facts(value: Any) -> Facts:
    """Return the length, the most frequent script and the share of digits of a text."""
    if not isinstance(value, str):
        return {}
    counts = Counter(value[:MAX_SCRIPT_CHARS])
    scripts = Counter({"none": 0})
    for character, count in counts.items():
        if character.isalpha():
            scripts[unicodedata.name(character, "other").partition(" ")[0].lower()] += count
    digits = sum(count for character, count in counts.items() if character.isdigit())
    return {
        "length": float(len(value)),
        "script": scripts.most_common(1)[0][0],
        "digits": digits / max(1, counts.total()),
    }


def image_facts(value: Any) -> Facts:
    """Return facts about an image (bytes, or base64 in JSON) or about an array of numbers.

    Those of an image are width, height, brightness and contrast (from 0 to 1). Those of an array
    are mean, contrast (the standard deviation), minimum and maximum. Other values have none.
    """
    if (vector := vector_of(value)) is not None:
        return {
            "mean": float(vector.mean()),
            "contrast": float(vector.std()),
            "minimum": float(vector.min()),
            "maximum": float(vector.max()),
        }
    facts: Facts = {}
    try:
        if isinstance(value, dict):
            value = value["b64"]  # KServe and TensorFlow Serving encode bytes like this.
        if isinstance(value, str):
            value = base64.b64decode(value.rpartition(",")[2])  # A data URL has a comma.
        with Image.open(io.BytesIO(value), formats=FORMATS) as image:
            width, height = image.size
            facts |= {"width": float(width), "height": float(height)}
            if width * height <= MAX_PIXELS:
                image.draft("L", (64, 64))
                gray = image.convert("L")
                gray.thumbnail((64, 64), reducing_gap=2.0)
                pixels = ImageStat.Stat(gray)
                facts["brightness"] = pixels.mean[0] / 255
                facts["contrast"] = pixels.stddev[0] / 255
    except Exception:  # A client's bytes: Pillow's decoders raise errors of many types.
        pass
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
