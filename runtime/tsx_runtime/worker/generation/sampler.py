"""Draws the next token of each sequence of a batch by its own parameters, in transformers'
continuous batching.

The engine takes the token of the highest score. For a sequence that samples, the sampler chooses
that token: it adds Gumbel noise to the scores that temperature, top-k and top-p leave, and the
highest sum is a draw from their distribution (the Gumbel-max trick). The noise is a function of
seed, position and token, so an answer can be repeated, whoever shares the batch. Greedy sequences
keep their scores.

Penalties need the tokens so far. The newest one may be on the device alone, since steps overlap
there, so each sequence that has penalties has its tokens on the device, and each step adds the one
that it continues. A step changes the scores of these tokens alone: what is as large as the
vocabulary for each sequence would take longer than a small model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context
from transformers.generation.logits_process import LogitsProcessorList

from tsx_runtime.worker.generation.interface import Sampling, TokenLogprob

MIX = tuple(
    factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # splitmix64's, signed
BITS = 23  # of a random number; with one more, the largest would round to 1 in fp32
GREEDY = {
    "temperature": 0.0,
    "logprobs": -1,
    "penalized": None,
}  # the arguments of transformers' own requests, which warm up


class NextToken(NamedTuple):
    """A row of the scores."""

    sequence: str
    position: int
    arguments: dict[str, Any]  # those of `sampling_arguments`
    state: Any  # the engine's


class PenalizedSequence:
    """A sequence whose scores change with its tokens, or by `logit_bias`.

    `tokens`: those of the prompt, `prompt` in number, and of the answer. `biased`: those of
    `biases`.
    """

    prompt: int
    tokens: torch.Tensor
    biased: torch.Tensor
    biases: torch.Tensor

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._position = 0

    def __deepcopy__(
        self, memo: Any
    ) -> PenalizedSequence:  # called when the sequence loses its cache
        return self

    def begin_step(self, row: NextToken, scores: torch.Tensor) -> bool:
        """Check whether the token that the row continues is to be added.

        A step that is repeated has the same position.
        """
        tokens, before, self._position = row.state.initial_tokens, self._position, row.position
        if row.position != len(tokens):
            return row.position > before
        # The sequence begins, also anew after it lost its cache: then the tokens include what it
        # generated.
        self.prompt = row.state._true_initial_tokens or len(tokens)
        self.tokens = _on(scores, tokens, torch.int64)
        biases = self.sampling.logit_bias or {}
        self.biased = _on(scores, list(biases), torch.int64)
        self.biases = _on(scores, list(biases.values()), torch.float32)
        return False


class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # transformers has no types here
    """All processors of an engine: those that the model's own configuration calls for, and then its
    own work.
    """

    def __init__(self, others: list[Any]) -> None:
        super().__init__(LogitsProcessorList(others))
        self.rows: list[NextToken] = []  # of the batch
        self.only_continues = False  # it has a token of each sequence, and no prompts
        self._logprobs: defaultdict[str, dict[int, tuple[torch.Tensor, Any]]] = defaultdict(
            dict
        )  # by sequence and position

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """They are `sampling_arguments`."""

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self.rows = [
            NextToken(
                state.request_id,
                state.position_offset,
                state.logit_processor_kwargs or GREEDY,
                state,
            )
            for state in states
        ]
        self.only_continues = all(request.query_length == 1 for request in requests_in_batch)
        super().prepare_tensor_args(requests_in_batch, arg_storage)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        """Scores of shape (sequences, vocabulary), fp32; in those that come back, the next token of
        each sequence has the highest.
        """
        model_scores = super().__call__(input_ids, scores, logits_processor_args)
        scores = self._penalize(input_ids, model_scores)
        drawn = [
            (index, row) for index, row in enumerate(self.rows) if row.arguments["temperature"] > 0
        ]
        if drawn:
            chosen_rows = _on(scores, [index for index, _ in drawn], torch.int64)
            chosen = draw(scores[chosen_rows], [row for _, row in drawn])
            scores = scores.index_fill(0, chosen_rows, -torch.inf)
            scores[chosen_rows, chosen] = 0.0
        for index, row in enumerate(self.rows):
            if (others := row.arguments["logprobs"]) >= 0:
                logprobs = model_scores[index].log_softmax(-1)
                of_chosen = logprobs.gather(-1, scores[index].argmax(-1, keepdim=True))
                self._logprobs[row.sequence][row.position] = (
                    of_chosen,
                    logprobs.topk(min(others, len(logprobs))),
                )
        return scores

    def _penalize(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`tokens`: those that the rows continue, of shape (sequences,)."""
        chosen = [
            (index, row, sequence)
            for index, row in enumerate(self.rows)
            if (sequence := row.arguments["penalized"]) is not None
        ]
        if not chosen:
            return scores
        for index, row, sequence in chosen:
            if sequence.begin_step(row, scores):
                sequence.tokens = torch.cat([sequence.tokens, tokens[index, None].long()])
        return penalized(scores, {index: sequence for index, _, sequence in chosen})

    def take_logprobs(
        self, sequence: str, position: int, token: int, finished: bool
    ) -> TokenLogprob | None:
        """Of the token that follows so many tokens of the sequence, as the model gives them,
        without temperature and noise.
        """
        found = self._logprobs[sequence].pop(position, None) if sequence in self._logprobs else None
        if finished:
            self.forget([sequence])
        if found is None:
            return None
        of_chosen, top = found
        return TokenLogprob(
            token,
            float(of_chosen),
            list(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
        )

    def forget(self, sequences: Sequence[str]) -> None:
        for sequence in sequences:
            self._logprobs.pop(sequence, None)


class SamplingRunner(ModelRunner):  # type: ignore[misc]  # as above
    """Samples after the model's step instead of within it.

    A CUDA graph repeats all that it was recorded with: here it is the model alone.

    Graphs run the steps that only continue sequences; those with prompts have ever new sizes, and
    recording takes as long as many steps.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._logits: torch.Tensor | None = (
            None  # of the last step, (sequences or more, vocabulary)
        )

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        super().compute_batch(model, batch_data)
        count = len(self.logit_processor.rows)
        if not count or self._logits is None:
            return
        with stream_context(self.inputs_and_outputs.compute_stream):
            tokens = batch_data["input_ids"][0, batch_data["logits_indices"][:count]]
            scores = self.logit_processor(
                tokens, self._logits[:count].float(), batch_data["logits_processor_args"][:, :count]
            )
            *_, output_ids = self.inputs_and_outputs.get_cb_kwargs()
            self._sample(scores[None], output_ids)

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        forward, use_graph = super()._get_forward_fn(use_block_table)
        return forward, use_graph and self.logit_processor.only_continues

    def _forward_process_and_sample(
        self, model: Any, batch_data: dict[str, Any], *tokens: torch.Tensor
    ) -> None:
        carry_over_ids, previous_output_ids, _ = tokens
        self.inputs_and_outputs.carry_over_tokens(
            batch_data["input_ids"], carry_over_ids, previous_output_ids
        )
        logits = model(**batch_data).logits[0]
        if "logits_to_keep" not in batch_data:
            logits = logits[batch_data["logits_indices"]]
        if not self.pad_inputs:  # no graphs
            self._logits = logits
            return
        if self._logits is None:  # one place for all graphs, which would each keep their own
            self._logits = logits.new_empty(self.cb_config.max_requests_per_batch, logits.shape[-1])
        self._logits[: len(logits)].copy_(logits)


def draw(scores: torch.Tensor, rows: Sequence[NextToken]) -> torch.Tensor:
    """The token of each sequence, of shape (sequences,), int64.

    `scores`: (sequences, vocabulary), before temperature.
    """
    arguments = [row.arguments for row in rows]
    size = scores.shape[-1]
    limits = [min(each["top_k"] or size, size) for each in arguments]
    scores = scores / _on(
        scores, [[max(each["temperature"], 1e-6)] for each in arguments], torch.float32
    )
    tokens = torch.arange(size, device=scores.device).expand_as(scores)
    if min(limits) < size or any(each["top_p"] < 1 for each in arguments):
        scores, tokens = scores.topk(max(limits), dim=-1)
        limit = _on(scores, [[each] for each in limits], torch.int64)
        scores = scores.masked_fill(
            torch.arange(scores.shape[-1], device=scores.device) >= limit, -torch.inf
        )
        likely = scores.softmax(-1)
        scores = scores.masked_fill(
            likely.cumsum(-1) - likely
            >= _on(scores, [[each["top_p"]] for each in arguments], torch.float32),
            -torch.inf,
        )
    seeds = _on(scores, [[each["seed"]] for each in arguments], torch.int64)
    positions = _on(scores, [[row.position] for row in rows], torch.int64)
    return tokens.gather(-1, (scores + gumbel(seeds, positions, tokens)).argmax(-1, keepdim=True))[
        :, 0
    ]


def penalized(scores: torch.Tensor, sequences: Mapping[int, PenalizedSequence]) -> torch.Tensor:
    """Return scores of shape (sequences, vocabulary).

    `sequences`: those that have penalties, by row.

    The repetition penalty is that of https://arxiv.org/abs/1909.05858, the others are those of
    OpenAI's API.
    """
    samplings = [sequence.sampling for sequence in sequences.values()]
    penalties = [
        (each.repetition_penalty or 1.0, each.frequency_penalty, each.presence_penalty)
        for each in samplings
    ]
    rows, penalty = _on(scores, list(sequences), torch.int64), _on(scores, penalties, torch.float32)

    def cells(
        tokens: list[torch.Tensor],
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]:
        """Where the tokens of each sequence are in the scores, and the three penalties at each
        place.
        """
        sizes = [len(part) for part in tokens]
        owners = torch.arange(len(sizes), device=scores.device)
        owners = owners.repeat_interleave(_on(scores, sizes, torch.int64), output_size=sum(sizes))
        return (rows[owners], torch.cat(tokens)), penalty[owners].unbind(1)

    biased, _ = cells([sequence.biased for sequence in sequences.values()])
    scores = scores.index_put(
        biased, torch.cat([sequence.biases for sequence in sequences.values()]), accumulate=True
    )
    # A token that occurs several times is written several times, with the same value.
    seen, (repetition, *_) = cells([sequence.tokens for sequence in sequences.values()])
    scores[seen] = torch.where(
        scores[seen] < 0, scores[seen] * repetition, scores[seen] / repetition
    )
    generated, (_, frequency, presence) = cells(
        [sequence.tokens[sequence.prompt :] for sequence in sequences.values()]
    )
    scores[generated] -= presence
    return scores.index_put_(generated, -frequency, accumulate=True)


def _on(scores: torch.Tensor, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """On the device of the scores, without waiting for it."""
    return torch.tensor(values, dtype=dtype).to(scores.device, non_blocking=True)


def sampling_arguments(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return what a request of the engine carries for the sampler; `seed` is for one without its
    own.
    """
    return {
        "temperature": float(sampling.temperature or 0),
        "top_k": min(sampling.top_k or 0, (1 << 31) - 1),
        "top_p": (
            1.0 if sampling.top_p is None else max(float(sampling.top_p), 1e-6)
        ),  # the most likely token always stays
        "seed": folded(seed if sampling.seed is None else sampling.seed),
        "logprobs": sampling.top_logprobs if sampling.logprobs else -1,
        "penalized": PenalizedSequence(sampling) if sampling.changes_scores else None,
    }


def folded(seed: int) -> int:
    """Into the 31 bits that a row of the batch's inputs has for it."""
    return (seed * MIX[0] & (1 << 64) - 1) >> 33


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Noise of shape (sequences, tokens), a function of what is given alone: the same on every
    device, in every batch.
    """
    start = _mixed(seeds.long() * MIX[0] + positions)
    bits = _mixed(start + tokens * MIX[0]) >> (64 - BITS) & ((1 << BITS) - 1)
    return -(-((bits + 0.5) / (1 << BITS)).log()).log()


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """splitmix64's last steps, on signed numbers that wrap around."""
    numbers = (numbers ^ (numbers >> 30 & (1 << 34) - 1)) * MIX[1]
    numbers = (numbers ^ (numbers >> 27 & (1 << 37) - 1)) * MIX[2]
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)
