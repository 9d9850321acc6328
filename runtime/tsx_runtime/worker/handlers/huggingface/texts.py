"""The base of tasks that read text without a pipeline of transformers: one call of the tokenizer
for the requests of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from tsx_runtime.worker.exceptions import InvalidInput, each_or_bad
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface.batches import Budget
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.tasks import (
    MOST_PARTS,
    Request,
    Task,
    Unit,
)

# characters of all pairs of a request, whose texts are tokenized with each of the others
MOST_PAIRED = 10_000_000
# for each token that the model takes: of longer texts only as much is tokenized as the model reads
CHARACTERS = 8
# of a tokenizer, behind the last token that the model reads: so far a cut changes none that it
# reads
WORDS_BEHIND = 8
EXAMPLE = ["Warm-up", "The first request is as fast as the tenth."]


class TextRow(NamedTuple):
    input: int  # of its request
    text: str
    pair: str | None = None
    cut: bool = False  # where it is longer than the model takes; else it is refused
    language: str | None = None  # of the text, for models that read several


class TextTask(Task):
    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.tokenizer = loaded.tokenizer
        if self.tokenizer.pad_token is None:
            self.budget = Budget(loaded.budget.most, 0)  # rows of one length only

    def read_inputs(self, inputs: list[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        return [a_text(each) for each in inputs]

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {})

    def rows(self, request: Request) -> list[TextRow]:
        return [
            TextRow(number, text, None, request.parameters.get("truncation", False))
            for number, text in enumerate(request.inputs)
        ]

    def key(self, request: Request) -> Hashable:
        """Rows of requests of one key go into one call of the model."""
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
            chosen = [index for index, each in enumerate(kinds) if each == kind]
            encodings.update(
                zip(chosen, self._tokenized([rows[index][1] for index in chosen]), strict=True)
            )
        units: list[list[Unit]] = [[] for _ in requests]
        for index, (position, row) in enumerate(rows):
            length = len(encodings[index]["input_ids"])
            units[position].append(
                Unit(position, row.input, encodings[index], length, self.key(requests[position]))
            )
        return [unit for own in each_or_bad(self._checked, units) for unit in own]

    def _checked(self, _: int, own: list[Unit]) -> list[Unit]:
        return [check_length(unit, self.loaded) for unit in own]

    def _tokenized(self, rows: Sequence[TextRow]) -> list[dict[str, Any]]:
        """Rows of one kind."""
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


def a_text(given: Any, name: str = "inputs") -> str:
    """Raises InvalidInput."""
    if not isinstance(given, str):
        raise InvalidInput(
            f"`{name}` must be text or a list of texts, and not {type(given).__name__}."
        )
    if not given.strip():
        raise InvalidInput(f"`{name}` is empty: it must have at least one character.")
    return given


def check_text(text: str, step: int) -> None:
    """Raises ValueError for a text that alone makes too many parts, each of which begins so many
    tokens after the last.
    """
    if len(text) > MOST_PARTS * step:
        too_many = (
            f"The text has {len(text)} characters: too many for parts that begin {step} tokens"
            " apart"
        )
        raise ValueError(f"{too_many}. Send less, or let them overlap less.")


def beginning(loaded: Loaded, text: str) -> str:
    """Of a text that is much longer than the model takes a part from its start, which has more
    tokens than that; the first are the text's.

    A cut changes tokens near to it. Others have words behind them, with a character that is neither
    a digit nor a space: the expressions that split texts into words look ahead over a run of
    digits, or of spaces.
    """
    most = loaded.most_tokens
    if (
        most is None
        or len(text) <= CHARACTERS * most
        or loaded.tokenizer.truncation_side != "right"
    ):
        return text
    size = CHARACTERS * most
    while size < len(text):
        encodings = loaded.tokenizer(text[:size], add_special_tokens=False, verbose=False).encodings
        if not encodings:  # a tokenizer in Python, which does not say what its words are
            break
        words = encodings[0].word_ids
        if len(words) > most:
            behind = text[encodings[0].offsets[most][0] : size]
            count = (
                words[-1] - words[most] if words[-1] else len(behind.split())
            )  # to some tokenizers a text is one word
            if count > WORDS_BEHIND and re.search(r"[^\s\d]", behind):
                return text[:size]
        size *= CHARACTERS
    return text


def shortened(loaded: Loaded, text: str, pair: str | None = None) -> tuple[str, str | None]:
    """As much as the model reads.

    Where two long texts share an odd number of tokens, either may get the one that is left over.

    Two that cannot be cut between words are cut by characters: the tokenizer's own cut takes a time
    that grows with the product of both.
    """
    if pair is None:
        return beginning(loaded, text), None
    one, other = beginning(loaded, text), beginning(loaded, pair)
    bound = CHARACTERS**2 * (loaded.most_tokens or len(text))
    if min(len(one), len(other)) > bound:
        kept = slice(bound) if loaded.tokenizer.truncation_side == "right" else slice(-bound, None)
        return one[kept], other[kept]
    return one, other


def check_length(unit: Unit, loaded: Loaded) -> Unit:
    """Raises ValueError where it is longer than the model takes."""
    if loaded.most_tokens is not None and unit.length > loaded.most_tokens:
        raise ValueError(
            f"The input has at least {unit.length} tokens; the model takes at most"
            f" {loaded.most_tokens}. Send less, or have it cut by the parameter `truncation`: true,"
            " where the task has it."
        )
    return unit


def check_pairs(texts: Sequence[str], others: Sequence[str]) -> None:
    """Each text is tokenized once for each of the others.

    Raises InvalidInput where that is too much.
    """
    characters = len(others) * sum(map(len, texts)) + len(texts) * sum(map(len, others))
    if characters > MOST_PAIRED:
        too_much = (
            f"The pairs of texts have {characters} characters together; at most {MOST_PAIRED} are"
            " taken"
        )
        raise InvalidInput(f"{too_much}. Send shorter texts, or several requests.")


def text_cost(loaded: Loaded, rows: Sequence[tuple[str, str | None]]) -> int:
    """Of a row no more than the model reads of it.

    A text that is in several rows is tokenized once.
    """
    most, special = (
        loaded.most_tokens or 1 << 40,
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
