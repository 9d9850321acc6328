"""The base of tasks that read text without a pipeline of transformers.

The tokenizer is called once for all requests of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from tsx_runtime.worker.exceptions import InvalidInput, map_rows
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface.batches import Budget
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.tasks import (
    MAX_PARTS,
    Request,
    Task,
    Unit,
)

# Characters of all pairs of a request, since each pair is tokenized.
MAX_PAIRED_CHARS = 10_000_000
# A text with more characters for each token of the model is cut before it is tokenized.
CHARS_PER_TOKEN = 8
# Words between the last token that the model reads and the cut. A cut can change tokens near it.
MIN_FOLLOWING_WORDS = 8
EXAMPLE = ["Warm-up", "The first request is as fast as the tenth."]


class TextRow(NamedTuple):
    """A text, or a pair of texts, for the tokenizer.

    Attributes:
        input: The index of the input in its request.
        text: The text.
        pair: The second text of a pair.
        cut: Whether a text that is too long for the model is cut. If not, it is refused.
        language: The language of the text, for models that read several.
    """

    input: int
    text: str
    pair: str | None = None
    cut: bool = False
    language: str | None = None


class TextTask(Task):
    """A task that reads texts by a tokenizer."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.tokenizer = loaded.tokenizer
        if self.tokenizer.pad_token is None:
            # Without padding, only rows of one length run together.
            self.budget = Budget(loaded.budget.max_tokens, 0)

    def read_inputs(self, inputs: list[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        return [as_text(value) for value in inputs]

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {})

    def rows(self, request: Request) -> list[TextRow]:
        return [
            TextRow(number, text, None, request.parameters.get("truncation", False))
            for number, text in enumerate(request.inputs)
        ]

    def key(self, request: Request) -> Hashable:
        """Return a key; rows of requests with equal keys go into one call of the model."""
        return None

    def units(self, requests: Sequence[Request]) -> list[Unit]:
        rows = [
            (position, row)
            for position, request in enumerate(requests)
            for row in self.rows(request)
        ]
        kinds = [(row.pair is None, row.cut, row.language) for _, row in rows]
        encodings: dict[int, Any] = {}
        for kind in set(kinds):
            chosen = [index for index, row_kind in enumerate(kinds) if row_kind == kind]
            encodings.update(
                zip(chosen, self._tokenized([rows[index][1] for index in chosen]), strict=True)
            )
        units: list[list[Unit]] = [[] for _ in requests]
        for index, (position, row) in enumerate(rows):
            length = len(encodings[index]["input_ids"])
            units[position].append(
                Unit(position, row.input, encodings[index], length, self.key(requests[position]))
            )
        return [unit for checked in map_rows(self._check_lengths, units) for unit in checked]

    def _check_lengths(self, _: int, units: list[Unit]) -> list[Unit]:
        return [check_length(unit, self.loaded) for unit in units]

    def _tokenized(self, rows: Sequence[TextRow]) -> list[dict[str, Any]]:
        """Tokenize rows of one kind."""
        first = rows[0]
        before = getattr(self.tokenizer, "src_lang", None)
        if first.language is not None:
            self.tokenizer.src_lang = first.language
        texts, pairs = (
            list(column)
            for column in zip(
                *(shortened(self.loaded, row.text, row.pair) for row in rows), strict=True
            )
        )
        try:
            columns = self.tokenizer(
                texts, None if first.pair is None else pairs, truncation=first.cut, verbose=False
            )
        finally:
            if first.language is not None:
                self.tokenizer.src_lang = before
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def padded(self, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for some units, padded on the right."""
        longest = max(unit.length for unit in units)
        fills = {
            "input_ids": self.tokenizer.pad_token_id or 0,
            "token_type_ids": self.tokenizer.pad_token_type_id,
        }
        inputs = {}
        for name in self.tokenizer.model_input_names:
            if name in units[0].tensors:
                fill = [fills.get(name, 0)]
                columns = [unit.tensors[name] + fill * (longest - unit.length) for unit in units]
                inputs[name] = torch.tensor(columns).to(self.loaded.device)
        return inputs

    def cost(self, request: Request) -> int:
        return text_cost(self.loaded, [(row.text, row.pair) for row in self.rows(request)])


def as_text(value: Any, name: str = "inputs") -> str:
    """Return a value that must be a text.

    Raises:
        InvalidInput: It is empty or no text.
    """
    if not isinstance(value, str):
        raise InvalidInput(
            f"`{name}` must be text or a list of texts, and not {type(value).__name__}."
        )
    if not value.strip():
        raise InvalidInput(f"`{name}` is empty: it must have at least one character.")
    return value


def check_text(text: str, step: int) -> None:
    """Check that a text does not make too many parts.

    Args:
        text: The text.
        step: The number of tokens between the beginnings of two parts.

    Raises:
        ValueError: It makes too many.
    """
    if len(text) > MAX_PARTS * step:
        too_many = (
            f"The text has {len(text)} characters: too many for parts that begin {step} tokens"
            " apart"
        )
        raise ValueError(f"{too_many}. Send less, or let them overlap less.")


def beginning(loaded: Loaded, text: str) -> str:
    """Return the start of a text that is much too long for the model; other texts do not change.

    The start has more tokens than the model takes, and those that the model reads are the text's.

    A cut changes tokens near it. A token is unchanged if enough words follow, with a character that
    is neither a digit nor a space. Tokenizers look ahead over runs of digits and spaces.
    """
    most = loaded.max_tokens
    if (
        most is None
        or len(text) <= CHARS_PER_TOKEN * most
        or loaded.tokenizer.truncation_side != "right"
    ):
        return text
    size = CHARS_PER_TOKEN * most
    while size < len(text):
        encodings = loaded.tokenizer(text[:size], add_special_tokens=False, verbose=False).encodings
        if not encodings:  # A tokenizer in Python does not report its words.
            break
        word_ids = encodings[0].word_ids
        if len(word_ids) > most:
            following = text[encodings[0].offsets[most][0] : size]
            # For some tokenizers a text is one word.
            count = word_ids[-1] - word_ids[most] if word_ids[-1] else len(following.split())
            if count > MIN_FOLLOWING_WORDS and re.search(r"[^\s\d]", following):
                return text[:size]
        size *= CHARS_PER_TOKEN
    return text


def shortened(loaded: Loaded, text: str, pair: str | None = None) -> tuple[str, str | None]:
    """Return the parts of a text, or of a pair, that the model can read.

    If two long texts share an odd number of tokens, either may get the last one. Texts that cannot
    be cut between words are cut between characters. The tokenizer's own cut would take a time that
    grows with the product of both lengths.
    """
    if pair is None:
        return beginning(loaded, text), None
    first, second = beginning(loaded, text), beginning(loaded, pair)
    bound = CHARS_PER_TOKEN**2 * (loaded.max_tokens or len(text))
    if min(len(first), len(second)) > bound:
        part = slice(bound) if loaded.tokenizer.truncation_side == "right" else slice(-bound, None)
        return first[part], second[part]
    return first, second


def check_length(unit: Unit, loaded: Loaded) -> Unit:
    """Return a unit that must fit the model.

    Raises:
        ValueError: It is longer than the model takes.
    """
    if loaded.max_tokens is not None and unit.length > loaded.max_tokens:
        raise ValueError(
            f"The input has at least {unit.length} tokens; the model takes at most"
            f" {loaded.max_tokens}. Send less, or have it cut by the parameter `truncation`: true,"
            " where the task has it."
        )
    return unit


def check_pairs(texts: Sequence[str], partners: Sequence[str]) -> None:
    """Check the size of all pairs of a text and a partner, since each pair is tokenized.

    Raises:
        InvalidInput: The pairs have too many characters.
    """
    characters = len(partners) * sum(map(len, texts)) + len(texts) * sum(map(len, partners))
    if characters > MAX_PAIRED_CHARS:
        too_much = (
            f"The pairs of texts have {characters} characters together; at most"
            f" {MAX_PAIRED_CHARS} are taken"
        )
        raise InvalidInput(f"{too_much}. Send shorter texts, or several requests.")


def text_cost(loaded: Loaded, rows: Sequence[tuple[str, str | None]]) -> int:
    """Return the tokens that the model reads of all rows.

    A text that occurs in several rows is tokenized once.
    """
    most, special = (
        loaded.max_tokens or 1 << 40,
        [loaded.tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)],
    )
    count = cache(
        lambda text: len(
            loaded.tokenizer(beginning(loaded, text), add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
        )
    )
    return sum(
        min(count(text) + (0 if pair is None else count(pair)) + special[pair is not None], most)
        for text, pair in rows
    )
