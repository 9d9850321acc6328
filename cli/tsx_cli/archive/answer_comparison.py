"""Compares a model's answers in a batch with its answers one by one, apart from rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tsx_cli.common.client import error_text
from tsx_runtime.core.shadowing.comparison import compare_bodies, differing, same_exactly
from tsx_runtime.core.shadowing.difference import Difference, excerpt
from tsx_runtime.core.shadowing.top_k import is_number
from tsx_runtime.plugins import ComparedAnswer


def findings(names: Sequence[str], alone: Sequence[ComparedAnswer], batched: Sequence[ComparedAnswer], tolerance: float) -> list[str]:
    """One text for each input whose answer in a batch is not its answer alone."""
    found = []
    for position, name in enumerate(names):
        if alone[position].status >= 400:
            found.append(f"{name}: answered {alone[position].status} when sent alone: {error_text(alone[position].body)}")
            continue
        first = difference(alone[position], batched[position], tolerance)
        if first is None:
            continue
        others = (other for other in range(len(alone)) if other != position)
        owner = next((other for other in others if difference(alone[other], batched[position], tolerance) is None), None)
        text = first.between("alone", "in a batch") if owner is None else f"in a batch, its answer was the answer to {names[owner]}"
        found.append(f"{name}: {text}")
    return found


def difference(alone: ComparedAnswer, batched: ComparedAnswer, tolerance: float) -> Difference | None:
    """The first one. Numbers may differ by `tolerance`, absolute or relative; types, keys and their order may not."""
    if batched.status != alone.status:
        return Difference("status", (), str(alone.status), str(batched.status), error_text(batched.body))
    types = [answer.headers.get("content-type") or "absent" for answer in (alone, batched)]
    if types[0] != types[1]:
        return Difference("content-type", (), *types)

    def same(one: Any, other: Any) -> bool:
        if same_exactly(one, other):
            return True
        return type(one) is type(other) and is_number(one) and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)

    found = compare_bodies(alone, batched, lambda one, other: differing(one, other, same, ordered=True))
    if found is not None and found.kind == "body":
        return found._replace(expected=excerpt(alone.body), actual=excerpt(batched.body))
    return found
