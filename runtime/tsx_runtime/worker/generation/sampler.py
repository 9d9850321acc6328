"""Draws the next token of each sequence of a batch by its own parameters, in transformers' continuous batching.

The engine takes the token of the highest score. For a sequence that samples, the sampler chooses that token: it adds Gumbel noise to the
scores that temperature, top-k and top-p leave, and the highest sum is a draw from their distribution (the Gumbel-max trick). The noise is
a function of seed, position and token, so an answer can be repeated, whoever shares the batch. Greedy sequences keep their scores.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context
from transformers.generation.logits_process import LogitsProcessorList

from tsx_runtime.worker.generation.interface import Sampling, TokenLogprob

MIX = tuple(factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64's, signed
BITS = 23  # of a random number; with one more, the largest would round to 1 in fp32
GREEDY = {"temperature": 0.0, "logprobs": -1}  # the arguments of transformers' own requests, which warm up


class NextToken(NamedTuple):
    """A row of the scores."""

    sequence: str
    position: int
    arguments: dict[str, Any]  # those of `sampling_arguments`


class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # transformers has no types here
    """All processors of an engine: those that the model's own configuration calls for, and then its own work."""

    def __init__(self, others: list[Any]) -> None:
        super().__init__(LogitsProcessorList(others))
        self.do_processing = True
        self.rows: list[NextToken] = []  # of the batch
        self.only_continues = False  # it has a token of each sequence, and no prompts
        self._logprobs: defaultdict[str, deque[tuple[torch.Tensor, int]]] = defaultdict(deque)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """They are `sampling_arguments`."""

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self.rows = [NextToken(state.request_id, state.position_offset, state.logit_processor_kwargs or GREEDY) for state in states]
        self.only_continues = all(request.query_length == 1 for request in requests_in_batch)
        return super().prepare_tensor_args(requests_in_batch, arg_storage) if self.logits_processor else arg_storage

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor) -> torch.Tensor:
        scores = super().__call__(input_ids, scores, logits_processor_args)
        for index, row in enumerate(self.rows):
            if row.arguments["logprobs"] >= 0:
                self._logprobs[row.sequence].append((scores[index].log_softmax(-1), row.arguments["logprobs"]))
        drawn = [(index, row) for index, row in enumerate(self.rows) if row.arguments["temperature"] > 0]
        if drawn:
            chosen_rows = _on(scores, [index for index, _ in drawn], torch.int64)
            chosen = draw(scores[chosen_rows], [row for _, row in drawn])
            scores = scores.index_fill(0, chosen_rows, -torch.inf)
            scores[chosen_rows, chosen] = 0.0
        return scores

    def take_logprobs(self, sequence: str, finished: bool) -> tuple[torch.Tensor, int] | None:
        """Of its oldest step that nobody has taken: those of all tokens as the model gives them, without temperature and noise."""
        waiting = self._logprobs.get(sequence)
        taken = waiting.popleft() if waiting else None
        if finished:
            self.forget([sequence])
        return taken

    def forget(self, sequences: Sequence[str]) -> None:
        for sequence in sequences:
            self._logprobs.pop(sequence, None)


class SamplingRunner(ModelRunner):  # type: ignore[misc]  # as above
    """Samples after the model's step instead of within it. A CUDA graph repeats all that it was recorded with: here it is the model alone.

    Graphs run the steps that only continue sequences; those with prompts have ever new sizes, and recording takes as long as many steps.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._logits: list[torch.Tensor] = []  # of this step, and the second of its recording
        self._recorded: dict[Any, torch.Tensor] = {}  # where each graph leaves its logits

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        self._logits.clear()
        super().compute_batch(model, batch_data)
        if len(self._logits) == 2:
            self._recorded[self.inputs_and_outputs.get_graph()] = self._logits.pop()
        logits = self._logits.pop() if self._logits else self._recorded[self.inputs_and_outputs.get_graph()]
        count = len(self.logit_processor.rows)
        if not count:
            return
        with stream_context(self.inputs_and_outputs.compute_stream):
            indices = batch_data["logits_indices"]
            scores = (logits if "logits_to_keep" in batch_data else logits[:, indices])[0, :count].float()
            scores = self.logit_processor(
                batch_data["input_ids"][0, indices[:count]], scores, batch_data["logits_processor_args"][:, :count]
            )
            *_, output_ids = self.inputs_and_outputs.get_cb_kwargs()
            self._sample(scores[None], output_ids)

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        forward, use_graph = super()._get_forward_fn(use_block_table)
        return forward, use_graph and self.logit_processor.only_continues

    def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *tokens: torch.Tensor) -> None:
        carry_over_ids, previous_output_ids, _ = tokens
        self.inputs_and_outputs.carry_over_tokens(batch_data["input_ids"], carry_over_ids, previous_output_ids)
        self._logits.append(model(**batch_data).logits)


def draw(scores: torch.Tensor, rows: Sequence[NextToken]) -> torch.Tensor:
    """The token of each sequence, of shape (sequences,)."""
    arguments = [row.arguments for row in rows]
    size = scores.shape[-1]
    limits = [min(each["top_k"] or size, size) for each in arguments]
    scores = scores / _on(scores, [[max(each["temperature"], 1e-6)] for each in arguments], torch.float32)
    tokens = torch.arange(size, device=scores.device).expand_as(scores)
    if min(limits) < size or any(each["top_p"] < 1 for each in arguments):
        scores, tokens = scores.topk(max(limits), dim=-1)
        limit = _on(scores, [[each] for each in limits], torch.int64)
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= limit, -torch.inf)
        likely = scores.softmax(-1)
        scores = scores.masked_fill(
            likely.cumsum(-1) - likely >= _on(scores, [[each["top_p"]] for each in arguments], torch.float32), -torch.inf
        )
    seeds = _on(scores, [[each["seed"]] for each in arguments], torch.int64)
    positions = _on(scores, [[row.position] for row in rows], torch.int64)
    return tokens.gather(-1, (scores + gumbel(seeds, positions, tokens)).argmax(-1, keepdim=True))[:, 0]


def _on(scores: torch.Tensor, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """On the device of the scores, without waiting for it."""
    return torch.tensor(values, dtype=dtype).to(scores.device, non_blocking=True)


def sampling_arguments(sampling: Sampling, seed: int) -> dict[str, float | int]:
    """What a request of the engine carries for the sampler; `seed` where it has none of its own."""
    return {
        "temperature": float(sampling.temperature or 0),
        "top_k": min(sampling.top_k or 0, (1 << 31) - 1),
        "top_p": 1.0 if sampling.top_p is None else max(float(sampling.top_p), 1e-6),  # the most likely token always stays
        "seed": folded(seed if sampling.seed is None else sampling.seed),
        "logprobs": sampling.top_logprobs if sampling.logprobs else -1,
    }


def folded(seed: int) -> int:
    """Into the 31 bits that a row of the batch's inputs has for it."""
    return (seed * MIX[0] & (1 << 64) - 1) >> 33


def token_logprob(logprobs: torch.Tensor, others: int, token: int) -> TokenLogprob:
    top = logprobs.topk(min(others, len(logprobs))) if others else None
    return TokenLogprob(
        token, float(logprobs[token]), [] if top is None else list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    )


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Noise of shape (sequences, tokens), a function of what is given alone: the same on every device, in every batch."""
    start = _mixed(seeds.long() * MIX[0] + positions)
    bits = _mixed(start + tokens * MIX[0]) >> (64 - BITS) & ((1 << BITS) - 1)
    return -(-((bits + 0.5) / (1 << BITS)).log()).log()


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """splitmix64's last steps, on signed numbers that wrap around."""
    numbers = (numbers ^ (numbers >> 30 & (1 << 34) - 1)) * MIX[1]
    numbers = (numbers ^ (numbers >> 27 & (1 << 37) - 1)) * MIX[2]
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)
