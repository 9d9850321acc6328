"""From texts to the tokens that bert.py takes: words become numbers by a hash, texts of a batch are
padded to the longest.
"""

import zlib

import torch

WORDS, LONGEST = 8192, 128
START, PADDING = 1, 0


def tokens_of(text: str) -> list[int]:
    return [START, *(2 + zlib.crc32(word.encode()) % (WORDS - 2) for word in text.lower().split())][
        :LONGEST
    ]


def padded(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[PADDING] * (longest - len(text))] for text in texts])
    return {"tokens": tokens, "mask": (tokens != PADDING).long()}
