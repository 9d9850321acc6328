"""The text of tokens as they arrive: whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens decoded before the new ones. Many tokenizers write a token's space only after others.
CONTEXT_TOKENS = 6
MAX_DECODED_TOKENS = 48  # decoded again with each new token
INCOMPLETE = "\ufffd"
# More cannot become one character: its UTF-8 has at most three bytes before the last.
MAX_INCOMPLETE = 3


class Detokenizer:
    """A decoder of tokens as they arrive.

    Joined, the results of `push` and `finish` are the text of all tokens, as it follows the prompt.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        # The characters of `_ids` that belong to the prompt, or were returned.
        self._sent = len(decode(self._ids).rstrip(INCOMPLETE))

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that new tokens complete."""
        self._ids += ids
        text = self._decode(self._ids)
        incomplete = (
            len(text) - len(text.rstrip(INCOMPLETE)) if len(self._ids) < MAX_DECODED_TOKENS else 0
        )
        end = max(len(text) - min(incomplete, MAX_INCOMPLETE), self._sent)
        piece = text[self._sent : end]
        self._sent = end
        if not incomplete and len(self._ids) > 4 * CONTEXT_TOKENS:
            self._ids = self._ids[-CONTEXT_TOKENS:]
            self._sent = len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        return self._decode(self._ids)[self._sent :]


class StopStrings:
    """A filter that ends a text at a stop string, and holds back its possible beginning."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be sent, and the stop string that ends it."""
        if not self._stops:
            return text, None
        text = self._held + text
        matches = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if matches:
            index, stop = min(matches)
            return text[:index], stop
        # The longest end of the text with which a stop string begins.
        held = max(
            size
            for stop in self._stops
            for size in range(min(len(stop), len(text) + 1))
            if text.endswith(stop[:size])
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._held
