"""Draws the next token of each sequence of a batch by its own parameters, in transformers' continuous batching.

The engine takes the token of the highest score. For a sequence that samples, the sampler chooses that token: it adds Gumbel noise to the
scores that temperature, top-k and top-p leave, and the highest sum is a draw from their distribution (the Gumbel-max trick). The noise is
a function of seed, position and token, so an answer can be repeated, whoever shares the batch. Greedy sequences keep their scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from tsx_runtime.worker.generation.interface import Sampling, TokenLogprob

MIX = tuple(factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64's, signed
BITS = 23  # of a random number; with one more, the largest would round to 1 in fp32


class Parameter(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]  # transformers has no types here
    """One number of each sequence as a row of the batch's inputs, from where a CUDA graph reads it. Changes no score."""

    ignored_kwargs = ()

    def __init__(self, name: str, kind: type[int] | type[float]) -> None:
        self.supported_kwargs = {name: kind}
        self._name = name
        self._dtype = torch.int32 if kind is int else torch.float32
        self.row = torch.empty(0)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        return torch.tensor([self._value(each.state) for each in requests_with_new_token], dtype=self._dtype).view(torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.row = tensor_arg[: len(scores)].view(self._dtype).unsqueeze(-1)
        return scores

    def _value(self, state: Any) -> float:
        return float(state.logit_processor_kwargs.get(self._name, 0)) if self._dtype is torch.float32 else self._whole(state)

    def _whole(self, state: Any) -> int:
        return int(state.logit_processor_kwargs.get(self._name, 0))


class Position(Parameter):
    """Of the token that is drawn, in its sequence."""

    def __init__(self) -> None:
        super().__init__("position", int)
        self.supported_kwargs = {}

    def _whole(self, state: Any) -> int:
        return int(state.position_offset)


class Sampler(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]  # as above
    """The last of the processors. `eager`: no graph is captured of its work, so it does only what the batch needs, and tells logprobs."""

    supported_kwargs = {"logprobs": int}  # how many others of each token; below 0: none at all
    ignored_kwargs = ()

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self._temperature, self._top_k, self._top_p = Parameter("temperature", float), Parameter("top_k", int), Parameter("top_p", float)
        self._seed, self._position = Parameter("seed", int), Position()
        self._requests: list[Any] = []
        self._logprobs: dict[str, tuple[torch.Tensor, int]] = {}

    def beside(self, others: list[Any]) -> ContinuousBatchingLogitsProcessorList:
        """All processors of an engine; `others` are those that the model's own configuration calls for."""
        own = [self._temperature, self._top_k, self._top_p, self._seed, self._position, self]
        processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([*others, *own]))
        processors.tensors_required += len(own)
        return processors

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._requests = requests_with_new_token
        return torch.zeros(len(requests_with_new_token), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if not self.eager:
            chosen = self._draw(scores, slice(None), scores.shape[-1])
            return torch.where(self._temperature.row > 0, torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0), scores)
        for index, request in enumerate(self._requests):
            if (others := request.state.logit_processor_kwargs["logprobs"]) >= 0:
                self._logprobs[request.state.request_id] = scores[index].log_softmax(-1), others
        rows = (self._temperature.row[:, 0] > 0).nonzero()[:, 0]
        if len(rows):
            limits = self._top_k.row[rows]
            width = min(int(limits.max()), scores.shape[-1]) if int(limits.min()) > 0 else scores.shape[-1]
            sort = width < scores.shape[-1] or float(self._top_p.row[rows].min()) < 1
            chosen = self._draw(scores, rows, width, sort)
            scores = scores.index_fill(0, rows, -torch.inf)
            scores[rows, chosen[:, 0]] = 0.0
        return scores

    def take_logprobs(self) -> Mapping[str, tuple[torch.Tensor, int]]:
        """Of the last step, by request: those of all tokens as the model gives them, without temperature and noise."""
        taken, self._logprobs = self._logprobs, {}
        return taken

    def _draw(self, scores: torch.Tensor, rows: torch.Tensor | slice, width: int, sort: bool = True) -> torch.Tensor:
        scores = scores[rows] / self._temperature.row[rows].clamp(min=1e-6)
        tokens = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        if sort:
            scores, tokens = scores.topk(width, dim=-1)
            limit = torch.where(self._top_k.row[rows] > 0, self._top_k.row[rows], width)
            scores = scores.masked_fill(torch.arange(width, device=scores.device) >= limit, -torch.inf)
            likely = scores.softmax(-1)
            scores = scores.masked_fill(likely.cumsum(-1) - likely >= self._top_p.row[rows], -torch.inf)
        noise = gumbel(self._seed.row[rows], self._position.row[rows], tokens)
        return tokens.gather(-1, (scores + noise).argmax(-1, keepdim=True))


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
