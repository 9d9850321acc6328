"""Joins requests of different clients into one call of `predict_fn`, if tests show that no answer changes.

Whether a function treats the rows of a tensor separately is unknown, so it is tried: for each rank and type of its inputs, the
first batches are run one by one, for the clients, and a second time joined, with an invented input beside them, so that they differ.
Only where the joined answers were the single ones are later batches joined; and one that fails joined runs one by one again. Rows are laid
end to end; where that is not the same, inputs without a dimension for rows are stacked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tsx_runtime.worker.codecs.responses import is_out_of_device_memory
from tsx_runtime.worker.exceptions import in_words

TRIALS = 3  # batches that have to agree
TOLERANCE = 1e-3  # of the greatest value: a product of matrices differs a little with their sizes
WAYS = ("rows", "stack")

logger = logging.getLogger("tsx.worker")


class NotJoined(Exception):
    """The joined result cannot be split into those of the inputs."""


class Joining:
    """`predict(input)` for each of a batch; a result may be an exception."""

    def __init__(self, predict: Callable[[Any], Any]) -> None:
        self._predict = predict
        self._agreed: dict[tuple[Any, ...], tuple[str, int]] = {}  # kind -> way, and how many trials went well
        self._refused: set[tuple[Any, ...]] = set()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        results: list[Any] = [None] * len(inputs)
        for group in groups(inputs):
            given = [inputs[index] for index in group]
            for index, result in zip(group, self._answer(given), strict=True):
                results[index] = result
        return results

    def _answer(self, given: list[Any]) -> list[Any]:
        kind = kind_of(given[0])
        if len(given) == 1 or kind is None or kind in self._refused:
            return [self._alone(each) for each in given]
        way, agreed = self._agreed.get(kind, ("", 0))
        if agreed >= TRIALS:
            try:
                return self._joined(given, way)
            except Exception as error:  # the boundary to a user's code: one bad input must not fail the others
                if is_out_of_device_memory(error):
                    raise  # a smaller batch will do
                logger.warning("a batch of requests failed, and its requests are run one by one: %s", in_words(error))
        results = [self._alone(each) for each in given]
        if agreed < TRIALS:
            self._try(kind, given, results)
        return results

    def _alone(self, given: Any) -> Any:
        try:
            return self._predict(given)
        except Exception as error:  # the boundary to a user's code: it fails this request alone
            if is_out_of_device_memory(error):
                raise
            return error

    def _joined(self, given: Sequence[Any], way: str) -> list[Any]:
        if way == "stack":
            return parted(self._predict(torch.stack(list(given))), [None] * len(given))
        return parted(self._predict(torch.cat(list(given))), [len(each) for each in given])

    def _try(self, kind: tuple[Any, ...], given: list[Any], results: list[Any]) -> None:
        """Whether the joined answers are the same; they are not sent."""
        sound = [(each, result) for each, result in zip(given, results, strict=True) if not isinstance(result, Exception)]
        if not sound:
            return
        known, agreed = self._agreed.get(kind, ("", 0))
        other = varied(sound[0][0], agreed)
        expected = self._alone(other)
        if not isinstance(expected, Exception):
            sound.append((other, expected))
        given, results = [each for each, _ in sound], [result for _, result in sound]
        if all(torch.equal(given[0], each) for each in given[1:]):
            return  # such rows would agree whatever is done with them
        why = ""
        for way in (known,) if known else WAYS if given[0].ndim else WAYS[1:]:
            try:
                joined = self._joined(given, way)
            except Exception as error:  # the boundary to a user's code
                why = why or in_words(error)
                continue
            if all(agrees(one, other) for one, other in zip(results, joined, strict=True)):
                self._agreed[kind] = (way, agreed + 1)
                return
            why = why or "the answers differ from those to single requests"
        self._refused.add(kind)
        text = "requests are not batched (%s); a batch_predict_fn(inputs, model) in your program can answer them at once"
        logger.info(text, why)


def varied(given: torch.Tensor, seed: int) -> torch.Tensor:
    """Another input of the same kind, drawn from the values of this one: clients may all send the same, which shows nothing."""
    draw = torch.Generator().manual_seed(seed)
    flat = given.flatten()
    if not len(flat):
        return given
    other = flat[torch.randint(len(flat), (len(flat),), generator=draw).to(flat.device)]
    if given.is_floating_point():
        other = other * (0.5 + 0.5 * torch.rand(len(flat), generator=draw)).to(other)
    return other.view_as(given)


def kind_of(value: Any) -> tuple[Any, ...] | None:
    """Of what a trial says something: the same rank, type and device."""
    return (value.ndim, value.dtype, value.device) if isinstance(value, torch.Tensor) and not value.is_sparse else None


def groups(inputs: Sequence[Any]) -> list[list[int]]:
    """Positions of inputs that can be joined: tensors that differ in nothing but how many rows they have. Any other is alone."""
    found: dict[Any, list[int]] = {}
    for index, value in enumerate(inputs):
        kind = kind_of(value)
        found.setdefault(("alone", index) if kind is None else (kind, value.shape[1:]), []).append(index)
    return list(found.values())


def parted(value: Any, sizes: Sequence[int | None]) -> list[Any]:
    """A result, and each of its tensors, cut into those of the inputs: so many rows each, or for None one without the dimension of rows.

    Raises NotJoined.
    """
    if isinstance(value, torch.Tensor):
        rows = [1 if size is None else size for size in sizes]
        if not value.ndim or len(value) != sum(rows):
            raise NotJoined(f"{sum(rows)} rows gave a tensor of the shape {tuple(value.shape)}")
        parts = torch.split(value, rows)
        return [part[0] if size is None else part for part, size in zip(parts, sizes, strict=True)]
    if isinstance(value, dict):
        columns = {key: parted(each, sizes) for key, each in value.items()}
        return [{key: column[index] for key, column in columns.items()} for index in range(len(sizes))]
    if type(value) in (list, tuple):
        pieces = [parted(each, sizes) for each in value]
        return [type(value)(piece[index] for piece in pieces) for index in range(len(sizes))]
    raise NotJoined(f"a {type(value).__name__} cannot be parted")


def agrees(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point() or not one.numel():
            return torch.equal(one, other)
        greatest = float(one.abs().nan_to_num(posinf=0).max())
        return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * greatest, equal_nan=True)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(agrees(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(agrees, one, other))
    return False
