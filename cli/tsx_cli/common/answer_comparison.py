"""Whether two answers to one input are the same, apart from rounding."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

NOT_JSON = object()
SHOWN = 60


class Reply(NamedTuple):
    """What came back for one input."""

    status: int
    content_type: str
    body: bytes


def findings(names: Sequence[str], alone: Sequence[Reply], batched: Sequence[Reply], tolerance: float) -> list[str]:
    """What is wrong with the answers that inputs got in a batch, given those they got alone; one text an input, empty if all is well."""
    found = []
    for position, name in enumerate(names):
        if alone[position].status >= 400:
            found.append(f"{name}: answered {alone[position].status} when sent alone: {reason(alone[position].body)}")
            continue
        told = difference(alone[position], batched[position], tolerance)
        if told is None:
            continue
        owner = _owner(position, alone, batched[position], tolerance)
        found.append(f"{name}: in a batch it got the answer to {names[owner]}" if owner is not None else f"{name}: {told}")
    return found


def reason(body: bytes) -> str:
    """Of an error, the text in full, without the JSON around it; of anything else the beginning."""
    told = _parse(body)
    if isinstance(told, dict) and isinstance(told.get("message"), str):
        return str(told["message"])
    return clip(body)


def difference(alone: Reply, batched: Reply, tolerance: float) -> str | None:
    """The first thing in which the answer in a batch differs from the one alone; None where it does not.

    Numbers may differ by `tolerance`, absolute or relative; types and the order of keys may not; what is no JSON must be equal to the byte.
    """
    if batched.status != alone.status:
        return f"the status is {alone.status} alone and {batched.status} in a batch: {reason(batched.body)}"
    if batched.content_type != alone.content_type:
        return f"the content type is {alone.content_type or 'absent'} alone and {batched.content_type or 'absent'} in a batch"
    one, other = _parse(alone.body), _parse(batched.body)
    if one is NOT_JSON and other is NOT_JSON:
        return None if alone.body == batched.body else f"the bytes differ: {clip(alone.body)} alone, {clip(batched.body)} in a batch"
    return _json_difference(one, other, tolerance, "")


def _json_difference(one: object, other: object, tolerance: float, where: str) -> str | None:
    if type(one) is not type(other):
        return f"{_place(where)} is {_kind(one)} alone and {_kind(other)} in a batch"
    if isinstance(one, dict) and isinstance(other, dict):
        return _dict_difference(one, other, tolerance, where)
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{_place(where)} has {len(one)} items alone and {len(other)} in a batch"
        pairs = enumerate(zip(one, other, strict=True))
        return next((told for index, (a, b) in pairs if (told := _json_difference(a, b, tolerance, f"{where}[{index}]"))), None)
    return None if _equal(one, other, tolerance) else f"{_place(where)} is {clip(one)} alone and {clip(other)} in a batch"


def _dict_difference(one: dict[str, object], other: dict[str, object], tolerance: float, where: str) -> str | None:
    if one.keys() != other.keys():
        return f"{_place(where)} has the keys {clip(list(one))} alone and {clip(list(other))} in a batch"
    if list(one) != list(other):
        return f"{_place(where)} has its keys in another order in a batch: {clip(list(one))}, {clip(list(other))}"
    return next((told for key in one if (told := _json_difference(one[key], other[key], tolerance, f"{where}.{key}"))), None)


def _equal(one: object, other: object, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    if isinstance(one, (int, float)) and isinstance(other, (int, float)) and not isinstance(one, bool):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return one == other


def _owner(position: int, alone: Sequence[Reply], batched: Reply, tolerance: float) -> int | None:
    """The other input whose answer this one is."""
    others = (other for other in range(len(alone)) if other != position)
    return next((other for other in others if difference(alone[other], batched, tolerance) is None), None)


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return NOT_JSON


def _kind(value: object) -> str:
    if value is NOT_JSON:
        return "not JSON"
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a whole number",
        float: "a number with a fraction",
    }
    return names.get(type(value), "null")


def _place(where: str) -> str:
    return f"the answer's {where.removeprefix('.')}" if where else "the answer"


def clip(value: object) -> str:
    text = " ".join(value.decode("utf-8", "replace").split()) if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
