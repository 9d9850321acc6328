"""The division of a batch into groups of rows with similar lengths, to avoid padding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple


class Budget(NamedTuple):
    """The limits of one call of the model, in tokens.

    Attributes:
        max_tokens: The limit of tokens of all rows, with padding. A longer row runs alone.
        max_padding: The limit of padding tokens; more would cost as much as another call.
    """

    max_tokens: int
    max_padding: int


CPU, ACCELERATOR = Budget(4096, 48), Budget(32768, 4096)


def sub_batches(lengths: Sequence[int], budget: Budget) -> Iterator[list[int]]:
    """Yield the positions of rows that run in one call, beginning with the longest rows."""
    batch: list[int] = []
    longest = padding = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        padding += longest - lengths[position]
        if batch and (
            padding > budget.max_padding or (len(batch) + 1) * longest > budget.max_tokens
        ):
            yield batch
            batch, padding = [], 0
        if not batch:
            longest, padding = lengths[position], 0
        batch.append(position)
    if batch:
        yield batch


def run_batched(
    lengths: Sequence[int],
    keys: Sequence[Hashable],
    budget: Budget,
    run: Callable[[list[int]], Sequence[Any]],
) -> list[Any]:
    """Return the result of `run` for each row; only rows with equal keys run in one call.

    Args:
        lengths: The number of tokens of each row.
        keys: The key of each row.
        budget: The limits of one call.
        run: A function that returns a result for each of the given positions.
    """
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
