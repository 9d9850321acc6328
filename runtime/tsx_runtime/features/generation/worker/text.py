"""The conversion of arriving tokens to text: whole characters, and no part of a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# Previous tokens that are decoded with the new ones. Many tokenizers write the space before a token
# only if other tokens precede it.
CONTEXT_TOKENS = 6
MAX_DECODED_TOKENS = 48  # the limit of tokens that are decoded again with each new token
INCOMPLETE_CHAR = "\ufffd"
# An incomplete character has at most three bytes of UTF-8.
MAX_INCOMPLETE_CHARS = 3


class Detokenizer:
    """A decoder of arriving tokens.

    The results of `push` and `finish` together are the text of all tokens after the prompt.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        # How many characters of the text of `_ids` belong to the prompt or were returned already.
        self._sent_chars = len(decode(self._ids).rstrip(INCOMPLETE_CHAR))

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is complete with the new tokens."""
        self._ids += ids
        text = self._decode(self._ids)
        incomplete_chars = (
            len(text) - len(text.rstrip(INCOMPLETE_CHAR))
            if len(self._ids) < MAX_DECODED_TOKENS
            else 0
        )
        end = max(len(text) - min(incomplete_chars, MAX_INCOMPLETE_CHARS), self._sent_chars)
        piece = text[self._sent_chars : end]
        self._sent_chars = end
        if not incomplete_chars and len(self._ids) > 4 * CONTEXT_TOKENS:
            self._ids = self._ids[-CONTEXT_TOKENS:]
            self._sent_chars = len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        return self._decode(self._ids)[self._sent_chars :]


def vocabulary_bytes(entry: str) -> bytes:
    """Return the bytes of a vocabulary's entry that is a part of a character.

    SentencePiece writes a byte as `<0xE2>`. Byte-level BPE has a printable character for each byte.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # an extra

    if re.fullmatch("<0x[0-9A-F]{2}>", entry):
        return bytes([int(entry[3:5], 16)])
    bytes_by_char = {char: byte for byte, char in bytes_to_unicode().items()}
    try:
        return bytes(map(bytes_by_char.__getitem__, entry))
    except KeyError:
        return entry.encode()


class StopStrings:
    """A filter that ends a text at a stop string, and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held_text = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be sent, and the stop string that ends it."""
        if not self._stops:
            return text, None
        text = self._held_text + text
        matches = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if matches:
            index, stop = min(matches)
            return text[:index], stop
        # The length of the longest end of the text that is the beginning of a stop string.
        held_chars = max(
            size
            for stop in self._stops
            for size in range(min(len(stop), len(text) + 1))
            if text.endswith(stop[:size])
        )
        self._held_text = text[len(text) - held_chars :]
        return text[: len(text) - held_chars], None

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._held_text
