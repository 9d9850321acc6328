"""Prompts of text generation: plain words, as many as a distribution says, and how many tokens an
answer may have.

They are requests of Hugging Face's inference API, `{"inputs", "parameters": {"max_new_tokens"},
"stream": true}`; the protocols of OpenAI make their own of them (`protocols`).
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from tsx_cli.bench.workload.payloads import Payload
from tsx_cli.common.failure import UsageError

COUNT = 256  # different prompts: one that comes again may be in a server's prefix cache
LONGEST = 1 << 17  # tokens
_LENGTHS = re.compile(r"(?:(constant|uniform|lognormal):)?(\d+)(?:,(\d+(?:\.\d+)?))?")


class Lengths(NamedTuple):
    """`constant:64`, `uniform:16,256` (both ends) or `lognormal:64,0.6` (median, and sigma of the
    logarithm), in tokens.
    """

    kind: str
    first: int
    second: float = 0.0

    def draw(self, chance: random.Random) -> int:
        if self.kind == "uniform":
            return chance.randint(self.first, int(self.second))
        drawn = (
            self.first * math.exp(chance.gauss(0.0, self.second))
            if self.kind == "lognormal"
            else self.first
        )
        return min(max(1, round(drawn)), LONGEST)


def parse_lengths(text: str, option: str) -> Lengths:
    """Raises UsageError."""
    found = _LENGTHS.fullmatch(text.strip())
    kind, first, second = (
        (found[1] or "constant", int(found[2]), found[3]) if found else ("", 0, None)
    )
    wrong = not 1 <= first <= LONGEST or (second is None) != (kind == "constant")
    if wrong or (
        kind == "uniform" and not (str(second).isdigit() and first <= int(second or 0) <= LONGEST)
    ):
        raise UsageError(
            f"{option}: '{text}' is not a length in tokens; give a number, uniform:16,256 or"
            f" lognormal:64,0.6 (median and sigma), from 1 to {LONGEST}"
        )
    return Lengths(kind, first, float(second or 0.0))


def prompts(
    lengths: Lengths, answers: Lengths, words: Sequence[str], count: int = COUNT, seed: int = 0
) -> list[Payload]:
    """The same for the same seed.

    A common word is one token for most tokenizers, so their number is near that of the tokens.
    """
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        text = " ".join(chance.choices(words, k=lengths.draw(chance)))
        body = {
            "inputs": text,
            "parameters": {"max_new_tokens": answers.draw(chance)},
            "stream": True,
        }
        made.append(Payload(json.dumps(body, separators=(",", ":")).encode(), "application/json"))
    return made
