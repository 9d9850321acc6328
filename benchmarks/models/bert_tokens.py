"""The tokens of texts for bert.py.

Words become numbers by a hash, and texts of a batch are padded to the longest.
"""

import zlib

import torch

WORDS, MAX_TOKENS = 8192, 128
START, PADDING = 1, 0


def tokens_of(text: str) -> list[int]:
    return [
        START,
        *(2 + zlib.crc32(token.encode()) % (WORDS - 2) for token in text.lower().split()),
    ][:MAX_TOKENS]


def padded(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    length = max(map(len, texts))
    tokens = torch.tensor([[*text, *[PADDING] * (length - len(text))] for text in texts])
    return {"tokens": tokens, "mask": (tokens != PADDING).long()}
