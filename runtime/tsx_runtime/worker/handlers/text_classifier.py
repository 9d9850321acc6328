"""Text classification: the classes of a text with their probabilities, from its words and word
pairs. Contract section 5.4.
"""

from __future__ import annotations

from typing import Any

import torch

from tsx_runtime.worker.exceptions import each_or_bad
from tsx_runtime.worker.handlers.staging import to_device
from tsx_runtime.worker.handlers.steps.explaining import token_attributions
from tsx_runtime.worker.handlers.steps.labels import map_class_to_label
from tsx_runtime.worker.handlers.steps.text_cleaning import ngrams_iterator
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.text import NotAText, TextHandler, text_of


class TokenBatch(tuple[torch.Tensor, Any]):
    """(numbers of all tokens, words), and where each text begins in the numbers.

    Of several texts there is a list of words each.
    """

    offsets: list[int]

    @staticmethod
    def of(numbers: list[list[int]], words: list[list[str]], device: Any) -> TokenBatch:
        flat = torch.tensor(
            [number for text in numbers for number in text], dtype=torch.int64, device=device
        )
        prepared = TokenBatch((flat, words[0] if len(words) == 1 else words))
        prepared.offsets = [sum(map(len, numbers[:idx])) for idx in range(len(numbers))]
        return prepared


class TextClassifier(TextHandler):
    """For a model that takes (numbers of all tokens, offsets of the texts), as one with an
    EmbeddingBag does, and gives logits.
    """

    ngrams = 2

    @timed
    def preprocess(self, data: Any) -> Any:
        texts = each_or_bad(lambda _, row: self._read(row), data, NotAText)
        return TokenBatch.of(
            [numbers for numbers, _ in texts], [words for _, words in texts], self.device
        )

    def _read(self, row: Any) -> tuple[list[int], list[str]]:
        """Return the numbers of a text's tokens, and its words. Raises `NotAText`."""
        words = self.tokens_of(text_of(row))
        numbers = self.numbers_of(ngrams_iterator(words, self.ngrams))
        if not numbers:
            raise NotAText("The text has no word that is in the model's vocabulary.")
        return numbers, words

    def tokens_of(self, text: str) -> list[str]:
        text = self._remove_html_tags(text).lower()
        text = self._remove_accented_characters(self._expand_contractions(text))
        return self._tokenize(self._remove_punctuation(text))

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        offsets = torch.tensor(getattr(data, "offsets", [0]), device=self.device)
        with torch.inference_mode():
            return self.model(to_device(data[0], self.device), offsets, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        return list(map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping))

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
        """How much each word speaks for class `target`; a pair's share goes to its words in
        halves.
        """
        numbers, words = tensor_data
        tokens = list(ngrams_iterator(words, self.ngrams))
        known = [token for token in tokens if self.numbers_of([token])]
        shares = token_attributions(
            self.model, numbers, torch.zeros(1, dtype=torch.int64, device=self.device), target
        )
        importances = torch.zeros(len(words))
        for token, share in zip(known, shares.tolist(), strict=True):
            for place in _places(words, token):
                importances[place] += share / tokens.count(token) / len(token.split())
        summed = self.summarize_attributions(importances[None, :, None])
        return [{"importances": summed.tolist(), "words": list(words)}]


def _places(words: list[str], token: str) -> list[int]:
    """Where the words of a token stand, each time that it occurs."""
    parts = token.split()
    starts = [
        start
        for start in range(len(words) - len(parts) + 1)
        if words[start : start + len(parts)] == parts
    ]
    return [start + offset for start in starts for offset in range(len(parts))]
