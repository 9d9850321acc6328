"""The text of tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# tokens before those that are decoded: many tokenizers write a token's space by what is before it
BEHIND = 6
LONGEST = 48  # tokens that are decoded again with each new one
INCOMPLETE = "\ufffd"
MOST_INCOMPLETE = 3  # of these may still become one character: the bytes of UTF-8 but the last


class Detokenizer:
    """Joined, what `push` and `finish` return is the text of all tokens, as it follows the
    prompt's.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-BEHIND:])
        self._sent = len(
            decode(self._ids).rstrip(INCOMPLETE)
        )  # characters of `_ids` that are not ours, or were returned

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._decode(self._ids)
        held = len(text) - len(text.rstrip(INCOMPLETE)) if len(self._ids) < LONGEST else 0
        end = max(len(text) - min(held, MOST_INCOMPLETE), self._sent)
        piece = text[self._sent : end]
        self._sent = end
        if not held and len(self._ids) > 4 * BEHIND:
            self._ids = self._ids[-BEHIND:]
            self._sent = len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        return self._decode(self._ids)[self._sent :]


class StopStrings:
    """Holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be sent, and the stop string that ends it."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            index, stop = min(found)
            return text[:index], stop
        # the longest end of the text that a stop string begins with
        held = max(
            size
            for stop in self._stops
            for size in range(min(len(stop), len(text) + 1))
            if text.endswith(stop[:size])
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def finish(self) -> str:
        return self._held
