"""The inputs of a step on a CPU, written by numpy.

An assignment to a part of a tensor takes tens of microseconds. transformers makes a dozen of them
for each step, which takes a few milliseconds with a small model.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID


class CpuInputs(ContinuousBatchingIOs):  # type: ignore[misc]  # transformers has no types here
    """The inputs of a step; with masks, graphs or block tables, transformers writes them."""

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[Any],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """Write the inputs of a step, and move the position of each request to its end."""
        if (
            self.device.type != "cpu"
            or use_padding
            or self.attention_mask is not None
            or self.block_table.numel()
        ):
            super().prepare_batch_tensors(
                requests_in_batch,
                logits_processors,
                use_decode_fast_path,
                num_q_tokens,
                max_kv_read,
                use_padding,
            )
            return
        self.requests_in_batch = requests_in_batch
        self.num_request_in_batch = len(requests_in_batch)
        self.num_q_tokens, self.max_kv_read = num_q_tokens, max_kv_read
        allocators = self.cache.cache_allocators
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []  # the indexes of the tokens after which requests get a next one
        key_counts: dict[str, list[int]] = {name: [] for name in allocators}
        writes: list[list[int]] = [[] for _ in allocators]
        reads: list[list[int]] = [[] for _ in allocators]
        for request in requests_in_batch:
            state, count = request.state, request.query_length
            start = state.position_offset
            state.position_offset = start + count
            tokens += state.tokens_to_process
            positions += range(start, start + count)
            for name, allocator in allocators.items():
                key_counts[name].append(allocator.get_seqlen_k(start, count))
            self.cache.extend_read_and_write_indices(
                state.request_id, start, count, reads if max_kv_read else None, writes
            )
            if request.has_new_token:
                last_rows.append(len(tokens) - 1)
                state.tokens_to_process = [TMP_TOKEN_ID]  # replaced by the next token
        logits_processors.prepare_tensor_args(
            requests_in_batch, self._bulk_input_tensor[self.static_inputs :]
        )
        query_counts = [request.query_length for request in requests_in_batch]
        self.total_seqlen_q, self.max_length_q = len(tokens), max(query_counts)
        self.total_seqlen_k = {name: sum(counts) for name, counts in key_counts.items()}
        self.max_length_k = {name: max(counts) for name, counts in key_counts.items()}
        self.true_write_sizes = [len(indexes) for indexes in writes]
        self.true_read_sizes = [len(indexes) for indexes in reads]
        # transformers reads one index per request, also where it needs none.
        last_rows += [0] * (len(requests_in_batch) - len(last_rows))
        for tensor, values in (
            (self.input_ids, tokens),
            (self.position_ids, positions),
            (self.cumulative_seqlens_q, accumulate(query_counts, initial=0)),
            (self.logits_indices, last_rows),
            *(
                (self.cumulative_seqlens_k[name], accumulate(counts, initial=0))
                for name, counts in key_counts.items()
            ),
            *zip(self.write_index_storage, writes, strict=True),
            *zip(self.read_index_storage, reads, strict=True),
        ):
            numbers = list(values)
            tensor.numpy()[: len(numbers)] = numbers
