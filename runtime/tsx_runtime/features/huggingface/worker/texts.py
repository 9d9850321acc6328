"""The base class of tasks for texts that use no pipeline of transformers.

The tokenizer is called once for all requests of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.huggingface.worker.batches import Budget
from tsx_runtime.features.huggingface.worker.loading import Loaded
from tsx_runtime.features.huggingface.worker.tasks import MAX_PARTS, Request, Task, Unit
from tsx_runtime.worker.exceptions import InvalidInput, map_rows

# The limit of characters in all pairs of a request, since each pair is tokenized.
MAX_PAIRED_CHARS = 10_000_000
# A text with more characters for each token of the model is cut before it is tokenized.
CHARS_PER_TOKEN = 8
# The number of words between the last token that the model reads and the cut, since a cut can
# change tokens near it.
MIN_FOLLOWING_WORDS = 8
EXAMPLE = ["Warm-up", "The first request is as fast as the tenth."]


class TextRow(NamedTuple):
    """A text, or a pair of texts, for the tokenizer.

    Attributes:
        input: The index of the input in its request.
        text: The text.
        pair: The second text of a pair.
        cut: Whether a text that is too long for the model is cut instead of refused.
        language: The language of the text, for models of several languages.
    """

    input: int
    text: str
    pair: str | None = None
    cut: bool = False
    language: str | None = None


class TextTask(Task):
    """A task that uses only a tokenizer to prepare texts."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.tokenizer = loaded.tokenizer
        if self.tokenizer.pad_token is None:
            # Without a padding token, only rows of equal length run together.
            self.budget = Budget(loaded.budget.max_tokens, 0)

    def read_inputs(self, inputs: list[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        return [require_text(value) for value in inputs]

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {})

    def rows(self, request: Request) -> list[TextRow]:
        return [
            TextRow(number, text, None, request.parameters.get("truncation", False))
            for number, text in enumerate(request.inputs)
        ]

    def key(self, request: Request) -> Hashable:
        """Return a key. Rows of requests with equal keys run in one call of the model."""
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
            row_indexes = [index for index, row_kind in enumerate(kinds) if row_kind == kind]
            encodings.update(
                zip(
                    row_indexes,
                    self._tokenize([rows[index][1] for index in row_indexes]),
                    strict=True,
                )
            )
        units: list[list[Unit]] = [[] for _ in requests]
        for index, (position, row) in enumerate(rows):
            length = len(encodings[index]["input_ids"])
            units[position].append(
                Unit(position, row.input, encodings[index], length, self.key(requests[position]))
            )
        return [
            unit for checked_units in map_rows(self._check_lengths, units) for unit in checked_units
        ]

    def _check_lengths(self, _: int, units: list[Unit]) -> list[Unit]:
        return [check_length(unit, self.loaded) for unit in units]

    def _tokenize(self, rows: Sequence[TextRow]) -> list[dict[str, Any]]:
        """Tokenize rows that have the same options."""
        first_row = rows[0]
        previous_language = getattr(self.tokenizer, "src_lang", None)
        if first_row.language is not None:
            self.tokenizer.src_lang = first_row.language
        texts, pairs = (
            list(column)
            for column in zip(
                *(cut_long_pair(self.loaded, row.text, row.pair) for row in rows), strict=True
            )
        )
        try:
            columns = self.tokenizer(
                texts,
                None if first_row.pair is None else pairs,
                truncation=first_row.cut,
                verbose=False,
            )
        finally:
            if first_row.language is not None:
                self.tokenizer.src_lang = previous_language
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def padded(self, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
        """Return the model's inputs for these units, padded on the right."""
        max_length = max(unit.length for unit in units)
        padding_values = {
            "input_ids": self.tokenizer.pad_token_id or 0,
            "token_type_ids": self.tokenizer.pad_token_type_id,
        }
        inputs = {}
        for name in self.tokenizer.model_input_names:
            if name in units[0].tensors:
                padding = [padding_values.get(name, 0)]
                columns = [
                    unit.tensors[name] + padding * (max_length - unit.length) for unit in units
                ]
                inputs[name] = torch.tensor(columns).to(self.loaded.device)
        return inputs

    def cost(self, request: Request) -> int:
        return text_cost(self.loaded, [(row.text, row.pair) for row in self.rows(request)])


def require_text(value: Any, name: str = "inputs") -> str:
    """Return the value, after checking that it is a text.

    Raises:
        InvalidInput: The value is empty or not a text.
    """
    if not isinstance(value, str):
        raise InvalidInput(
            f"`{name}` must be text or a list of texts, and not {type(value).__name__}."
        )
    if not value.strip():
        raise InvalidInput(f"`{name}` is empty: it must have at least one character.")
    return value


def check_text(text: str, step: int) -> None:
    """Check that a text would not be split into too many parts.

    Args:
        text: The text.
        step: The number of tokens between the beginnings of two parts.

    Raises:
        ValueError: There would be too many parts.
    """
    if len(text) > MAX_PARTS * step:
        too_many = (
            f"The text has {len(text)} characters: too many for parts that begin {step} tokens"
            " apart"
        )
        raise ValueError(f"{too_many}. Send less, or let them overlap less.")


def cut_long_text(loaded: Loaded, text: str) -> str:
    """Cut a text that is much too long for the model; return other texts unchanged.

    The result has more tokens than the model reads, and these begin with the tokens of the whole
    text. A cut can change tokens near it. Therefore enough words must follow the last token that
    the model reads, with a character that is neither a digit nor a space: tokenizers look ahead
    over runs of digits and spaces.
    """
    max_tokens = loaded.max_tokens
    if (
        max_tokens is None
        or len(text) <= CHARS_PER_TOKEN * max_tokens
        or loaded.tokenizer.truncation_side != "right"
    ):
        return text
    size = CHARS_PER_TOKEN * max_tokens
    while size < len(text):
        encodings = loaded.tokenizer(text[:size], add_special_tokens=False, verbose=False).encodings
        if not encodings:  # Tokenizers that are written in Python do not report words.
            break
        word_ids = encodings[0].word_ids
        if len(word_ids) > max_tokens:
            following_text = text[encodings[0].offsets[max_tokens][0] : size]
            # Some tokenizers report the whole text as one word.
            following_words = (
                word_ids[-1] - word_ids[max_tokens] if word_ids[-1] else len(following_text.split())
            )
            if following_words > MIN_FOLLOWING_WORDS and re.search(r"[^\s\d]", following_text):
                return text[:size]
        size *= CHARS_PER_TOKEN
    return text


def cut_long_pair(loaded: Loaded, text: str, pair: str | None = None) -> tuple[str, str | None]:
    """Cut a text or a pair of texts that is much too long for the model.

    If both texts of a pair are long and cannot be cut between words, they are cut between
    characters. The tokenizer's own cut would take a time that grows with the product of their
    lengths. With an odd number of tokens, either text may get the last one.
    """
    if pair is None:
        return cut_long_text(loaded, text), None
    first, second = cut_long_text(loaded, text), cut_long_text(loaded, pair)
    max_chars = CHARS_PER_TOKEN**2 * (loaded.max_tokens or len(text))
    if min(len(first), len(second)) > max_chars:
        part = (
            slice(max_chars)
            if loaded.tokenizer.truncation_side == "right"
            else slice(-max_chars, None)
        )
        return first[part], second[part]
    return first, second


def check_length(unit: Unit, loaded: Loaded) -> Unit:
    """Return a unit, after checking that it fits the model.

    Raises:
        ValueError: The unit has too many tokens.
    """
    if loaded.max_tokens is not None and unit.length > loaded.max_tokens:
        raise ValueError(
            f"The input has at least {unit.length} tokens; the model takes at most"
            f" {loaded.max_tokens}. Send less, or have it cut by the parameter `truncation`: true,"
            " where the task has it."
        )
    return unit


def check_pairs(texts: Sequence[str], partners: Sequence[str]) -> None:
    """Check the total size of all pairs of a text and a partner, since each pair is tokenized.

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
    """Return the number of tokens that the model reads in all rows.

    A text that occurs in several rows is tokenized only once.
    """
    max_tokens, special_tokens = (
        loaded.max_tokens or 1 << 40,
        [loaded.tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)],
    )
    count_tokens = cache(
        lambda text: len(
            loaded.tokenizer(cut_long_text(loaded, text), add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
        )
    )
    return sum(
        min(
            count_tokens(text)
            + (0 if pair is None else count_tokens(pair))
            + special_tokens[pair is not None],
            max_tokens,
        )
        for text, pair in rows
    )
