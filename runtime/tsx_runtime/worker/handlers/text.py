"""The base of text handlers: a vocabulary, and the steps from text to words. Contract section
5.4.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tsx_runtime.worker.exceptions import LoadError, form_advice, in_words
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.handlers.steps import text_cleaning

_CONVERT = "Save it as a plain dict: torch.save(vocab.get_stoi(), 'source_vocab.pt')"


class NotAText(ValueError):
    """A row without text that can be used; the message is for the client."""


class TextHandler(BaseHandler):
    """Has the archive's `source_vocab.pt` as `source_vocab`: from a token to its number."""

    input_kind = "text"

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        self.source_vocab = load_vocabulary(
            Path(self.get_source_vocab_path(context)), weights_only=self._weights_only()
        )

    def get_source_vocab_path(self, ctx: Context) -> str:
        name = (ctx.manifest.get("model") or {}).get("sourceVocab") or "source_vocab.pt"
        return str(Path(ctx.system_properties["model_dir"]) / Path(name).name)

    def numbers_of(self, tokens: Iterable[str]) -> list[int]:
        """Of a token that a plain dict does not have, the number of `<unk>`; without that it is
        left out.
        """
        if not isinstance(
            self.source_vocab, Mapping
        ):  # torchtext's own vocabulary, which knows its default
            return [int(self.source_vocab[token]) for token in tokens]
        unknown = self.source_vocab.get("<unk>")
        found = (self.source_vocab.get(token, unknown) for token in tokens)
        return [int(number) for number in found if number is not None]

    _remove_html_tags = staticmethod(text_cleaning.remove_html_tags)
    _expand_contractions = staticmethod(text_cleaning.expand_contractions)
    _remove_accented_characters = staticmethod(text_cleaning.remove_accents)
    _remove_punctuation = staticmethod(text_cleaning.remove_punctuation)
    _remove_puncutation = _remove_punctuation  # the name that it once had
    _tokenize = staticmethod(text_cleaning.tokenize)

    def get_word_token(self, input_tokens: Iterable[str]) -> list[str]:
        return list(input_tokens)

    def summarize_attributions(self, attributions: torch.Tensor) -> torch.Tensor:
        """From (1, tokens, features) to one number a token, of length 1 in all."""
        summed = attributions.sum(dim=-1).squeeze(0)
        length = torch.linalg.vector_norm(summed)
        return summed / length if length > 0 else summed


def text_of(row: Any) -> str:
    """What is under `data` or `body`, as text. Raises `NotAText`."""
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
    """A mapping of tokens to numbers; of a list, the places in it."""
    if not path.is_file():
        raise LoadError(
            f"The vocabulary {path.name} is not in the archive. Add it with --extra-files."
            f" {_CONVERT}."
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise LoadError(
            f"{path.name} holds more than plain data, and loading it would run code from it."
            f" {_CONVERT}, or, if you trust it, set `weightsOnly: false` in model-config.yaml."
        ) from error
    except (
        ImportError,
        AttributeError,
        RuntimeError,
    ) as error:  # of another library, or of another version of it
        raise LoadError(
            f"{path.name} cannot be read here: {in_words(error)}. {_CONVERT}."
        ) from error
    if isinstance(found, list):
        return {token: number for number, token in enumerate(found)}
    if not isinstance(found, Mapping) and not hasattr(found, "__getitem__"):
        raise LoadError(
            f"{path.name} holds a {type(found).__name__}, not a vocabulary. {_CONVERT}."
        )
    return found
