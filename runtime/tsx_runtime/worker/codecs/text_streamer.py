"""A streamer for the texts that a `transformers` model generates for a batch.

The streamers of `transformers` itself handle only one text.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any


class TextIteratorStreamerBatch:
    """An iterator over the new text of each row, as lists.

    Pass it to `model.generate(..., streamer=...)` in a thread, and iterate over it. A word is
    emitted once the space after it is generated, so that later tokens cannot change emitted text.

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
        # The tokens of each row's last line, whose text is emitted only in part.
        self._tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self._emitted_chars = [0] * batch_size  # emitted characters of these tokens

    def put(self, value: Any) -> None:
        """Take new tokens of shape (rows,), or the prompt of shape (rows, tokens)."""
        is_prompt, self._prompt_is_next = self._prompt_is_next, False
        if is_prompt and self.skip_prompt:
            return
        rows = value.tolist()
        if len(rows) != self.batch_size:
            raise ValueError(f"the streamer is for {self.batch_size} rows, but {len(rows)} came")
        self._pieces.put(
            [
                self._take_new_text(idx, row if isinstance(row, list) else [row])
                for idx, row in enumerate(rows)
            ]
        )

    def end(self) -> None:
        tails = [
            self._decode_tokens(idx)[self._emitted_chars[idx] :] for idx in range(self.batch_size)
        ]
        self._tokens, self._emitted_chars = [[] for _ in tails], [0 for _ in tails]
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

    def _take_new_text(self, idx: int, tokens: list[int]) -> str:
        self._tokens[idx] += tokens
        text, start = self._decode_tokens(idx), self._emitted_chars[idx]
        if text.endswith("\n"):
            self._tokens[idx], self._emitted_chars[idx] = [], 0
            return text[start:]
        end = max(
            text.rfind(" ") + 1, len(text) if _is_written_without_spaces(text[-1:]) else 0, start
        )
        self._emitted_chars[idx] = end
        return text[start:end]

    def _decode_tokens(self, idx: int) -> str:
        return str(self.tokenizer.decode(self._tokens[idx], **self.decode_kwargs))


def _is_written_without_spaces(character: str) -> bool:
    """Tell whether a character belongs to a script without blanks between words."""
    return any(
        first <= character <= last
        for first, last in (("\u3040", "\u30ff"), ("\u3400", "\u9fff"), ("\uf900", "\ufaff"))
    )
