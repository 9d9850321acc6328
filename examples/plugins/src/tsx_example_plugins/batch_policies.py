"""Half a batch goes at once; less than that waits for a fifth of maxBatchDelay."""

from __future__ import annotations

from tsx_runtime.plugins import Waiting


def half_full(waiting: Waiting) -> float:
    if 2 * waiting.count >= waiting.max_count:
        return 0.0
    return waiting.max_delay / 5 - waiting.oldest
