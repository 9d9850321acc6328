"""Draws the next token of each sequence of a batch by its own parameters, in transformers' continuous batching.

The engine takes the token of the highest score. For a sequence that samples, the sampler chooses that token: it adds Gumbel noise to the
scores that temperature, top-k and top-p leave, and the highest sum is a draw from their distribution (the Gumbel-max trick). The noise is
a function of seed, position and token, so an answer can be repeated, whoever shares the batch. Greedy sequences keep their scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.logits_process import LogitsProcessorList

from tsx_runtime.worker.generation.interface import Sampling, TokenLogprob

MIX = tuple(factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64's, signed
ROWS = ("temperature", "top_p", "top_k", "seed", "position")  # of the batch's inputs: two of fp32 and three of int32
BITS = 23  # of a random number; with one more, the largest would round to 1 in fp32


class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # transformers has no types here
    """All processors of an engine: those that the model's own configuration calls for, and then its own work.

    Each parameter is a row of the batch's inputs, from where a CUDA graph reads it. `eager`: no graph is captured, so it does only what
    the batch needs, and tells logprobs.
    """

    def __init__(self, others: list[Any], eager: bool) -> None:
        super().__init__(LogitsProcessorList(others))
        self._others = len(self.logits_processor) > 0
        self._first = self.tensors_required  # row
        self.tensors_required += len(ROWS)
        self.do_processing = True
        self.eager = eager
        self._requests: list[Any] = []
        self._draws = False
        self._logprobs: dict[str, tuple[torch.Tensor, int]] = {}

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """They are `sampling_arguments`."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        super().fill_defaults(int32_tensor)
        int32_tensor[self._first :].zero_()

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        if self._others:
            super().prepare_tensor_args(requests_in_batch, arg_storage)
        self._requests = [request.state for request in requests_in_batch if request.has_new_token]
        arguments = [state.logit_processor_kwargs for state in self._requests]
        self._draws = not self.eager or any(each["temperature"] > 0 for each in arguments)
        if self._draws:
            size = len(arguments)
            floats = torch.tensor([[each[name] for each in arguments] for name in ROWS[:2]], dtype=torch.float32).view(2, size)
            wholes = [[each[name] for each in arguments] for name in ROWS[2:4]] + [[state.position_offset for state in self._requests]]
            rows = torch.cat([floats.view(torch.int32), torch.tensor(wholes, dtype=torch.int32).view(3, size)])
            arg_storage[self._first :, :size] = rows.to(arg_storage.device)
        return arg_storage

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor) -> torch.Tensor:
        if self._others:
            scores = super().__call__(input_ids, scores, logits_processor_args)
        rows = logits_processor_args[self._first :, : len(scores)].unsqueeze(-1)
        if not self.eager:
            chosen = draw(scores, rows, scores.shape[-1], sort=True)
            return torch.where(rows[0].view(torch.float32) > 0, torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0), scores)
        for index, state in enumerate(self._requests):
            if (others := state.logit_processor_kwargs["logprobs"]) >= 0:
                self._logprobs[state.request_id] = scores[index].log_softmax(-1), others
        if self._draws:
            arguments = [(index, state.logit_processor_kwargs) for index, state in enumerate(self._requests)]
            drawn = [(index, each) for index, each in arguments if each["temperature"] > 0]
            chosen_rows = torch.tensor([index for index, _ in drawn])
            limits = [each["top_k"] or scores.shape[-1] for _, each in drawn]
            width = min(max(limits), scores.shape[-1])
            sort = min(limits) < scores.shape[-1] or any(each["top_p"] < 1 for _, each in drawn)
            chosen = draw(scores[chosen_rows], rows[:, chosen_rows], width, sort)
            scores = scores.index_fill(0, chosen_rows, -torch.inf)
            scores[chosen_rows, chosen[:, 0]] = 0.0
        return scores

    def take_logprobs(self) -> Mapping[str, tuple[torch.Tensor, int]]:
        """Of the last step, by request: those of all tokens as the model gives them, without temperature and noise."""
        taken, self._logprobs = self._logprobs, {}
        return taken


def draw(scores: torch.Tensor, rows: torch.Tensor, width: int, sort: bool) -> torch.Tensor:
    """The token of each sequence, of shape (sequences, 1). `width`: no top-k is larger. `sort`: there is a top-k or top-p to keep to."""
    temperature, top_p = rows[0].view(torch.float32), rows[1].view(torch.float32)
    top_k, seed, position = rows[2:]
    scores = scores / temperature.clamp(min=1e-6)
    tokens = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
    if sort:
        scores, tokens = scores.topk(width, dim=-1)
        limit = torch.where(top_k > 0, top_k, width)
        scores = scores.masked_fill(torch.arange(width, device=scores.device) >= limit, -torch.inf)
        likely = scores.softmax(-1)
        scores = scores.masked_fill(likely.cumsum(-1) - likely >= top_p, -torch.inf)
    return tokens.gather(-1, (scores + gumbel(seed, position, tokens)).argmax(-1, keepdim=True))


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
