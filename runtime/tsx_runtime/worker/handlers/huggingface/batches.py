"""Which rows of a batch run together: those of like length, so that little of what the model
computes is padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple


class Budget(NamedTuple):
    """Of one call of the model, in tokens."""

    most: int  # padding included; a longer row is alone
    # of padding: about what a call costs beside its tokens, so that another call would not be
    # cheaper
    waste: int


CPU, ACCELERATOR = Budget(4096, 48), Budget(32768, 4096)


def sub_batches(lengths: Sequence[int], budget: Budget) -> Iterator[list[int]]:
    """Positions of rows that run together, the longest first."""
    batch: list[int] = []
    longest = waste = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        waste += longest - lengths[position]
        if batch and (waste > budget.waste or (len(batch) + 1) * longest > budget.most):
            yield batch
            batch, waste = [], 0
        if not batch:
            longest, waste = lengths[position], 0
        batch.append(position)
    if batch:
        yield batch


def run_batched(
    lengths: Sequence[int],
    keys: Sequence[Hashable],
    budget: Budget,
    run: Callable[[list[int]], Sequence[Any]],
) -> list[Any]:
    """What `run` gives for each row, in their order; only rows of equal keys run together."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        groups[key].append(position)
    results: list[Any] = [None] * len(lengths)
    for group in groups.values():
        for batch in sub_batches([lengths[position] for position in group], budget):
            positions = [group[index] for index in batch]
            for position, result in zip(positions, run(positions), strict=True):
                results[position] = result
    return results
