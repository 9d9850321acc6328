"""The handler that returns the classes of a text, from its words and word pairs."""

from __future__ import annotations

from typing import Any

import torch

from tsx_runtime.worker.exceptions import map_rows
from tsx_runtime.worker.handlers.staging import to_device
from tsx_runtime.worker.handlers.steps.explaining import token_attributions
from tsx_runtime.worker.handlers.steps.labels import map_class_to_label
from tsx_runtime.worker.handlers.steps.text_cleaning import ngrams_iterator
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.text import NotAText, TextHandler, text_of


class TokenBatch(tuple[torch.Tensor, Any]):
    """A pair: the numbers of all tokens (int64, one dimension), and the words of the text.

    For several texts, the second item is a list of words for each text.

    Attributes:
        offsets: The position of each text's first token.
    """

    offsets: list[int]

    @staticmethod
    def of(numbers: list[list[int]], words: list[list[str]], device: Any) -> TokenBatch:
        """Join the numbers of several texts on the device."""
        flat = torch.tensor(
            [number for text in numbers for number in text], dtype=torch.int64, device=device
        )
        prepared = TokenBatch((flat, words[0] if len(words) == 1 else words))
        prepared.offsets = [sum(map(len, numbers[:idx])) for idx in range(len(numbers))]
        return prepared


class TextClassifier(TextHandler):
    """A handler for models with an EmbeddingBag.

    The model takes the numbers of all tokens (int64, one dimension) and the offsets of the texts
    (int64, one for each text). It returns logits of shape (batch, classes).

    Attributes:
        ngrams: The longest run of words that has a number of its own.
    """

    ngrams = 2

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return the `TokenBatch` of the requests' texts.

        Raises:
            BadRows: Some requests hold no text, or no word of the vocabulary.
        """
        texts = map_rows(lambda _, row: self._read(row), data, NotAText)
        return TokenBatch.of(
            [numbers for numbers, _ in texts], [text_words for _, text_words in texts], self.device
        )

    def _read(self, row: Any) -> tuple[list[int], list[str]]:
        """Return the numbers of a text's tokens, and its words.

        Raises:
            NotAText: The request holds no text, or no word of the vocabulary.
        """
        words = self.tokens_of(text_of(row))
        numbers = self.numbers_of(ngrams_iterator(words, self.ngrams))
        if not numbers:
            raise NotAText("The text has no word that is in the model's vocabulary.")
        return numbers, words

    def tokens_of(self, text: str) -> list[str]:
        """Clean a text and split it into words."""
        text = self._remove_html_tags(text).lower()
        text = self._remove_accented_characters(self._expand_contractions(text))
        return self._tokenize(self._remove_punctuation(text))

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the logits of the model, of shape (batch, classes).

        Args:
            data: A `TokenBatch`, or a pair of numbers and words of a single text.
            *args: Further arguments of the model.
            **kwargs: Further arguments of the model.
        """
        offsets = torch.tensor(getattr(data, "offsets", [0]), device=self.device)
        with torch.inference_mode():
            return self.model(to_device(data[0], self.device), offsets, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return for each text a dict from the names of all classes to their probabilities.

        Args:
            data: Logits of shape (batch, classes).
        """
        return list(map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping))

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
        """Return how much each word contributes to a class, computed by Captum.

        The contribution of a word pair is divided between its words.

        Args:
            tensor_data: The `TokenBatch` of a single text.
            raw_data: The request.
            target: The number of the class.

        Returns:
            A list of one dict: `importances`, a number for each word, and `words`.
        """
        numbers, words = tensor_data
        tokens = list(ngrams_iterator(words, self.ngrams))
        known = [token for token in tokens if self.numbers_of([token])]
        shares = token_attributions(
            self.model, numbers, torch.zeros(1, dtype=torch.int64, device=self.device), target
        )
        importances = torch.zeros(len(words))
        for token, share in zip(known, shares.tolist(), strict=True):
            for position in _positions(words, token):
                importances[position] += share / tokens.count(token) / len(token.split())
        summed = self.summarize_attributions(importances[None, :, None])
        return [{"importances": summed.tolist(), "words": list(words)}]


def _positions(words: list[str], token: str) -> list[int]:
    """Return the positions of the words of a token, for all its occurrences."""
    parts = token.split()
    starts = [
        start
        for start in range(len(words) - len(parts) + 1)
        if words[start : start + len(parts)] == parts
    ]
    return [start + offset for start in starts for offset in range(len(parts))]
