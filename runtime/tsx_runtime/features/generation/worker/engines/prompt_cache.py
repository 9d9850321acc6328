"""A paged cache of transformers in which sequences with equal salts share beginnings of prompts.

transformers registers each complete block of a sequence by a hash of its tokens and of the block
before. Here the first tokens are mixed with a salt, so that the blocks of different salts have
different hashes. The salt of a sequence is a part of its name, which all calls have.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from types import SimpleNamespace
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

SALT_BYTES = 32  # 8 tokens of 4 bytes, which are fewer than a block has
# The free share of the cache after an eviction; transformers evicts at 0.15.
FREE_AFTER_EVICTION = 0.3


class PromptCache(PagedAttentionCache):  # type: ignore[misc]  # transformers has no types here
    """A cache of prompts; names of sequences come from `sequence_name`.

    Attributes:
        cached_tokens: For each new sequence, the number of tokens of its prompt that were found.
            The reader removes them.
    """

    # transformers wraps this method for torch.compile, which no engine uses.
    update = inspect.unwrap(PagedAttentionCache.update)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cached_tokens: dict[str, int] = {}

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Give a sequence the cached blocks of its beginning, and return their number of tokens."""
        count = int(super().search_prefix_match(request_id, add_salt(request_id, prompt_ids)))
        if count:
            # A sequence that loses its cache finds its own blocks later.
            self.cached_tokens.setdefault(request_id, count)
        return count

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        """Register the blocks that a step has completed, under hashes of the salted tokens."""
        if complete_blocks:
            tokens = add_salt(state.request_id, state.initial_tokens + state.generated_tokens)
            salted_state = SimpleNamespace(
                request_id=state.request_id,
                status=state.status,
                initial_tokens=tokens,
                generated_tokens=[],
            )
            super().mark_complete_blocks(salted_state, complete_blocks)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Free the last block of a sequence first, so that its beginning is evicted last."""
        for allocator in self.cache_allocators.values():
            allocator.block_table.get(request_id, []).reverse()
        super().free_blocks(request_id, no_cache)

    def evict_cached_blocks(self) -> bool:
        """Evict the blocks that were freed first, and return whether there were any.

        A call while the cache has room comes from sequences that found no blocks. Then all cached
        blocks are evicted, as in transformers, before a running sequence loses its own.
        """
        missing = ceil((FREE_AFTER_EVICTION - self.compute_free_capacity()) * self.num_blocks)
        if missing <= 0:
            return bool(super().evict_cached_blocks())
        has_evicted = False
        for allocator in self.cache_allocators.values():
            blocks = list(allocator.ledger.cached_blocks)[:missing]
            for block in blocks:
                allocator.ledger.acquire(block)
                allocator.ledger.release(block, no_cache=True)
            self.pool.free_blocks(allocator.index, blocks)
            has_evicted = has_evicted or bool(blocks)
        return has_evicted


def sequence_name(number: int, *salts: bytes) -> str:
    """Return the name of a sequence, which shares blocks with those that have equal salts."""
    digest = blake2b(digest_size=SALT_BYTES)
    for salt in salts:
        digest.update(b"%d:%b" % (len(salt), salt))
    return f"{number}.{digest.hexdigest()}"


def add_salt(name: str, tokens: Sequence[int]) -> list[int]:
    """Mix the first tokens of a sequence with the salt in its name."""
    salts = array("i", bytes.fromhex(name.partition(".")[2]))
    return [
        *(token ^ salt for token, salt in zip(tokens, salts, strict=False)),
        *tokens[len(salts) :],
    ]
