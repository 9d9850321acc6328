"""The base class of text handlers: a vocabulary, and the steps from text to words."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tsx_runtime.worker.exceptions import LoadError, describe_error, form_advice
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.steps import text_cleaning

_CONVERSION_ADVICE = "Save it as a plain dict: torch.save(vocab.get_stoi(), 'source_vocab.pt')"


class NotAText(ValueError):
    """A row without usable text; the message is for the client."""


class TextHandler(BaseHandler):
    """A handler with the archive's vocabulary.

    Attributes:
        source_vocab: The content of `source_vocab.pt`: a mapping of tokens to numbers, or a
            vocabulary of torchtext.
    """

    input_kind = "text"

    def __init__(self) -> None:
        """Make a handler without a model; `initialize` loads it."""
        super().__init__()
        self.source_vocab: Any = None

    def initialize(self, context: Context) -> None:
        """Load the model and the vocabulary.

        Raises:
            LoadError: One of them cannot be loaded; the message says what to do.
        """
        super().initialize(context)
        self.source_vocab = load_vocabulary(
            Path(self.get_source_vocab_path(context)), weights_only=self._weights_only()
        )

    def get_source_vocab_path(self, ctx: Context) -> str:
        """Return the path of the vocabulary."""
        name = (ctx.manifest.get("model") or {}).get("sourceVocab") or "source_vocab.pt"
        return str(Path(ctx.system_properties["model_dir"]) / Path(name).name)

    def numbers_of(self, tokens: Iterable[str]) -> list[int]:
        """Return the numbers of tokens.

        A token that a plain dict lacks has the number of `<unk>`. Without `<unk>` it is left out.
        """
        if not isinstance(self.source_vocab, Mapping):  # torchtext's class knows its default.
            return [int(self.source_vocab[token]) for token in tokens]
        unknown = self.source_vocab.get("<unk>")
        numbers = (self.source_vocab.get(token, unknown) for token in tokens)
        return [int(number) for number in numbers if number is not None]

    _remove_html_tags = staticmethod(text_cleaning.remove_html_tags)
    _expand_contractions = staticmethod(text_cleaning.expand_contractions)
    _remove_accented_characters = staticmethod(text_cleaning.remove_accents)
    _remove_punctuation = staticmethod(text_cleaning.remove_punctuation)
    _remove_puncutation = _remove_punctuation  # TorchServe's former spelling
    _tokenize = staticmethod(text_cleaning.tokenize)

    def get_word_token(self, input_tokens: Iterable[str]) -> list[str]:
        """Return the tokens as a list."""
        return list(input_tokens)

    def summarize_attributions(self, attributions: torch.Tensor) -> torch.Tensor:
        """Return one number for each token, scaled to a vector of length 1.

        Args:
            attributions: A tensor of shape (1, tokens, features).

        Returns:
            A tensor of shape (tokens,).
        """
        summed = attributions.sum(dim=-1).squeeze(0)
        length = torch.linalg.vector_norm(summed)
        return summed / length if length > 0 else summed


def text_of(row: Any) -> str:
    """Return the text under `data` or `body`.

    Raises:
        NotAText: There is no text, or it is not UTF-8.
    """
    value = row.get("data") if isinstance(row, dict) else row
    if value is None and isinstance(row, dict):
        value = row.get("body")
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            value = str(value, "utf-8")
        except UnicodeDecodeError as error:
            raise NotAText(f"The request is not text in UTF-8: {error}") from error
    if not isinstance(value, str):
        raise NotAText(
            f"The request holds a {type(value).__name__}, not text: send the text as the body, "
            f"or as a field named 'data'.{form_advice(row)}"
        )
    return value


def load_vocabulary(path: Path, *, weights_only: bool) -> Any:
    """Return a mapping of tokens to numbers; for a list, the positions of its tokens.

    Raises:
        LoadError: The file is missing, or holds no vocabulary that can be loaded.
    """
    if not path.is_file():
        raise LoadError(
            f"The vocabulary {path.name} is not in the archive. Add it with --extra-files."
            f" {_CONVERSION_ADVICE}."
        )
    try:
        vocabulary = torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise LoadError(
            f"{path.name} holds more than plain data, and loading it would run code from it."
            f" {_CONVERSION_ADVICE}, or, if you trust it, set `weightsOnly: false` in"
            " model-config.yaml."
        ) from error
    except (ImportError, AttributeError, RuntimeError) as error:
        # The class belongs to another library, or to another version of it.
        raise LoadError(
            f"{path.name} cannot be read here: {describe_error(error)}. {_CONVERSION_ADVICE}."
        ) from error
    if isinstance(vocabulary, list):
        return {token: number for number, token in enumerate(vocabulary)}
    if not isinstance(vocabulary, Mapping) and not hasattr(vocabulary, "__getitem__"):
        raise LoadError(
            f"{path.name} holds a {type(vocabulary).__name__}, not a vocabulary."
            f" {_CONVERSION_ADVICE}."
        )
    return vocabulary
