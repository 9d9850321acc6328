"""Facts about values: numbers, categories, texts, images, vectors and answers."""

from __future__ import annotations

import base64
import io
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tsx_archiver.monitor.config import HEADER_PREFIX

Facts = dict[str, Any]  # numbers, categories and vectors by name; a missing value may be None
Vector = NDArray[np.float64]

MAX_NUMBER = 1e100  # A larger number, which is hardly a measurement, would overflow in sums.
MAX_CATEGORY_CHARS = 100
MAX_SCRIPT_CHARS = 2000  # characters of a text that are examined
MAX_PIXELS = 25_000_000  # Of a larger image, only the size is read.
LABEL_KEYS = ("label", "class", "prediction", "predicted_class", "class_id", "category")
SCORE_KEYS = ("score", "confidence", "probability")
SUM_TOLERANCE = 0.02  # The probabilities of a full distribution sum to 1 within it.
MAX_NAMED = 32  # A list of as many numbers is a vector, a shorter one is named numbers.
BODY = "body"  # the path of a row that is neither an object nor a short list
MAX_SHORT_LIST = 64  # A longer list of numbers is one field.
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
        return {
            "mean": vector.mean(),
            "contrast": vector.std(),
            "minimum": vector.min(),
            "maximum": vector.max(),
        }
    facts: Facts = {}
    with suppress(Exception):  # A client's bytes: Pillow's decoders raise errors of many types.
        if isinstance(value, dict):
            value = value["b64"]  # KServe and TensorFlow Serving encode bytes like this.
        if isinstance(value, str):
            value = base64.b64decode(value.rpartition(",")[2])  # A data URL has a comma.
        image = Image.open(io.BytesIO(value), formats=FORMATS)
        facts |= {"width": float(image.width), "height": float(image.height)}
        if image.width * image.height <= MAX_PIXELS:
            image.thumbnail((64, 64))
            pixels = np.asarray(image.convert("L")) / 255
            facts |= {"brightness": pixels.mean(), "contrast": pixels.std()}
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


def value_at(row: Any, path: str, headers: Mapping[str, str] = {}) -> Any:
    """Return the value at a path, such as `customer.age`, `0` or `header:x-country`, or None."""
    if isinstance(row, dict) and path in row:
        return row[path]  # Keys may have dots.
    if path == BODY:
        return row
    if path.startswith(HEADER_PREFIX):
        return headers.get(path.removeprefix(HEADER_PREFIX).lower())
    try:
        for part in path.split("."):
            row = row[int(part) if isinstance(row, list) else part]
    except (LookupError, TypeError, ValueError):
        return None
    return row


def values_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each field of a row."""
    items: Any = ()
    if isinstance(value, dict) and "b64" not in value:
        items = value.items()
    elif isinstance(value, list) and len(value) <= MAX_SHORT_LIST:
        items = () if any(isinstance(item, list | dict) for item in value) else enumerate(value)
    for name, item in items:
        yield from values_of(item, f"{path}.{name}" if path else str(name))
    if not items:
        yield path or BODY, value


def describe_answer(answer: Any) -> Facts:
    """Return the facts about an answer by name; a vector is its `similarity`.

    An integer, a boolean and a short text are a class, another number is a number. An object or
    a list of probabilities, and objects of a label and a score, are a classification. A list of at
    least 32 other numbers is a vector. Of another object, numbers and short texts are facts.
    """
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float):
        return {"number": number_of(answer)}
    if isinstance(answer, str) and len(answer) > MAX_CATEGORY_CHARS:
        return text_facts(answer)
    if (label := category_of(answer)) is not None:
        return {"class": label}
    facts: Facts = {}
    details: Any = {}
    scores = _scores_of(answer)
    if isinstance(answer, dict) and not scores:
        for name, value in answer.items():
            if name in LABEL_KEYS:
                facts |= describe_answer(value)
            elif name in SCORE_KEYS:
                facts["confidence"] = number_of(value)
            elif distribution := _scores_of(value):
                scores = distribution
            else:
                details[name] = value
    elif isinstance(answer, list) and not scores:
        vector = vector_of(answer)
        if vector is not None and len(vector) >= MAX_NAMED:
            return {"similarity": vector}
        details = {"count": len(answer)} if vector is None else answer
    for path, value in islice(values_of(details), MAX_NAMED):
        if len(path) > MAX_CATEGORY_CHARS:  # It is a text.
            continue
        if type(value) in (int, float):
            facts[path] = number_of(value)
        elif isinstance(value, str) and len(value) <= MAX_CATEGORY_CHARS:
            facts[path] = value
    if scores:
        best = max(scores, key=scores.__getitem__)
        facts = {"class": best, "confidence": float(scores[best]), **facts}
        if abs(sum(scores.values()) - 1) <= SUM_TOLERANCE:
            facts["entropy"] = -sum(p * math.log2(p) for p in scores.values() if p > 0)
    return facts


def _scores_of(value: Any) -> dict[str, float]:
    """Return scores by class, if a value is a classification.

    The probabilities of the best classes, whose sum is below 1, are known by their descending
    order.
    """
    scores = value
    if is_list := isinstance(value, list):
        if value and all(isinstance(item, dict) for item in value):
            return _labelled(value)
        scores = {str(index): p for index, p in enumerate(value)}
    if not isinstance(scores, dict) or len(scores) < 2:
        return {}
    numbers = list(scores.values())
    if not all(type(number) in (int, float) and 0 <= number <= 1 for number in numbers):
        return {}
    if max(map(len, scores)) > MAX_CATEGORY_CHARS:
        return {}  # They are texts.
    is_top = not is_list and sum(numbers) < 1 and numbers == sorted(numbers)[::-1] and numbers[2:]
    return scores if is_top or abs(sum(numbers) - 1) <= SUM_TOLERANCE else {}


def _labelled(items: list[dict[str, Any]]) -> dict[str, float]:
    """Return the scores of objects such as `{"label": "cat", "score": 0.9}`, the best by label."""
    scores: dict[str, float] = {}
    for facts in map(describe_answer, items):
        label, score = facts.get("class"), facts.get("confidence")
        if label is None or score is None:
            return {}
        scores[label] = max(score, scores.get(label, score))
    return scores
