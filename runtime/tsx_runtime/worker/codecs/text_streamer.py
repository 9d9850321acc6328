"""A streamer for the texts of a batch from a language model of `transformers`.

The streamers of `transformers` handle one text only.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any


class TextIteratorStreamerBatch:
    """An iterator over the new text of each row, as lists.

    Pass it to `model.generate(..., streamer=...)` in a thread, and iterate over it. A word is
    emitted once the space after it is known, so that emitted text never changes.

    Attributes:
        tokenizer: The tokenizer of the model.
        batch_size: The number of rows.
        skip_prompt: Whether the prompt is left out.
        timeout: Seconds to wait for the next piece before `queue.Empty` is raised.
        decode_kwargs: Arguments for `tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.skip_prompt = skip_prompt
        self.timeout = timeout
        self.decode_kwargs = decode_kwargs
        self._pieces: queue.Queue[list[str] | None] = queue.Queue()
        self._prompt_is_next = True
        self._tokens: list[list[int]] = [[] for _ in range(batch_size)]  # the partly emitted ones
        self._shown = [0] * batch_size  # the number of emitted characters of these tokens

    def put(self, value: Any) -> None:
        """Take new tokens of shape (rows,), or the prompt of shape (rows, tokens)."""
        prompt, self._prompt_is_next = self._prompt_is_next, False
        if prompt and self.skip_prompt:
            return
        rows = value.tolist()
        if len(rows) != self.batch_size:
            raise ValueError(f"the streamer is for {self.batch_size} rows, but {len(rows)} came")
        self._pieces.put(
            [
                self._next(idx, row if isinstance(row, list) else [row])
                for idx, row in enumerate(rows)
            ]
        )

    def end(self) -> None:
        tails = [self._text(idx)[self._shown[idx] :] for idx in range(self.batch_size)]
        self._tokens, self._shown = [[] for _ in tails], [0 for _ in tails]
        self._prompt_is_next = True
        self._pieces.put(tails)
        self._pieces.put(None)

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        piece = self._pieces.get(timeout=self.timeout)
        if piece is None:
            raise StopIteration
        return piece

    def _next(self, idx: int, tokens: list[int]) -> str:
        self._tokens[idx] += tokens
        text, shown = self._text(idx), self._shown[idx]
        if text.endswith("\n"):
            self._tokens[idx], self._shown[idx] = [], 0
            return text[shown:]
        end = max(text.rfind(" ") + 1, len(text) if _stands_alone(text[-1:]) else 0, shown)
        self._shown[idx] = end
        return text[shown:end]

    def _text(self, idx: int) -> str:
        return str(self.tokenizer.decode(self._tokens[idx], **self.decode_kwargs))


def _stands_alone(character: str) -> bool:
    """Tell whether a character belongs to a script without blanks between words."""
    return any(
        first <= character <= last
        for first, last in (("\u3040", "\u30ff"), ("\u3400", "\u9fff"), ("\uf900", "\ufaff"))
    )
