"""The sampler of transformers' continuous batching: it draws the next tokens of a batch.

Each sequence has its own parameters. The engine takes the token with the highest score. For a
sequence that samples, the sampler chooses that token: it adds Gumbel noise to the scores that
temperature, top-k and top-p leave. The highest sum is a draw from their distribution (the
Gumbel-max trick). The noise is a function of seed, position and token, so a text can be repeated in
any batch. Greedy sequences keep their scores.

Penalties need the tokens so far. The newest one may be on the device alone, since steps overlap
there. Each sequence with penalties therefore has its tokens on the device, and each step adds the
one that it continues. A step changes only the scores of these tokens: a tensor as large as the
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

# The factors of splitmix64, as signed numbers.
MIX = tuple(
    factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
RANDOM_BITS = 23  # With one more, the largest random number would round to 1 in fp32.
# The arguments of transformers' own requests, which warm up.
GREEDY = {"temperature": 0.0, "logprobs": -1, "penalized": None}


class NextToken(NamedTuple):
    """A sequence of a batch, as a row of the scores.

    Attributes:
        sequence: The name of the sequence.
        position: The number of its tokens so far.
        arguments: The `sampling_arguments` of the sequence.
        state: The state of the engine for it.
    """

    sequence: str
    position: int
    arguments: dict[str, Any]
    state: Any


class PenalizedSequence:
    """A sequence whose scores change with its tokens, or by `logit_bias`.

    Attributes:
        prompt: The number of tokens of the prompt.
        tokens: The tokens of the prompt and the generated text.
        biased: The tokens with a bias.
        biases: The biases of these tokens.
    """

    prompt: int
    tokens: torch.Tensor
    biased: torch.Tensor
    biases: torch.Tensor

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._position = 0

    # It is called when the sequence loses its cache.
    def __deepcopy__(self, memo: Any) -> PenalizedSequence:
        return self

    def begin_step(self, row: NextToken, scores: torch.Tensor) -> bool:
        """Tell whether the token that the row continues must be added.

        A step that is repeated has the same position.
        """
        tokens, last_position, self._position = (
            row.state.initial_tokens,
            self._position,
            row.position,
        )
        if row.position != len(tokens):
            return row.position > last_position
        # The sequence begins, maybe anew after it lost its cache. Its tokens then include generated
        # ones.
        self.prompt = row.state._true_initial_tokens or len(tokens)
        self.tokens = _on(scores, tokens, torch.int64)
        biases = self.sampling.logit_bias or {}
        self.biased = _on(scores, list(biases), torch.int64)
        self.biases = _on(scores, list(biases.values()), torch.float32)
        return False


class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # transformers has no types here
    """All processors of an engine: those of the model's own configuration, then the sampling."""

    def __init__(self, processors: list[Any]) -> None:
        super().__init__(LogitsProcessorList(processors))
        self.rows: list[NextToken] = []  # the sequences of the batch
        self.only_continues = False  # The batch has one token of each sequence, and no prompts.
        # The keys are sequences and positions.
        self._logprobs: defaultdict[str, dict[int, tuple[torch.Tensor, Any]]] = defaultdict(dict)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept the arguments, which are `sampling_arguments`."""

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
        """Return scores in which the next token of each sequence has the highest.

        Scores have the shape (sequences, vocabulary), in fp32.
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
            if (top_count := row.arguments["logprobs"]) >= 0:
                logprobs = model_scores[index].log_softmax(-1)
                chosen_logprob = logprobs.gather(-1, scores[index].argmax(-1, keepdim=True))
                self._logprobs[row.sequence][row.position] = (
                    chosen_logprob,
                    logprobs.topk(min(top_count, len(logprobs))),
                )
        return scores

    def _penalize(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Apply penalties; `tokens` of shape (sequences,) are those that the rows continue."""
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
        return apply_penalties(scores, {index: sequence for index, _, sequence in chosen})

    def take_logprobs(
        self, sequence: str, position: int, token: int, finished: bool
    ) -> TokenLogprob | None:
        """Return the log probabilities of the token at a position of a sequence.

        They come from the model's scores, without temperature and noise.
        """
        logprobs = (
            self._logprobs[sequence].pop(position, None) if sequence in self._logprobs else None
        )
        if finished:
            self.forget([sequence])
        if logprobs is None:
            return None
        chosen_logprob, top = logprobs
        return TokenLogprob(
            token,
            float(chosen_logprob),
            list(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
        )

    def forget(self, sequences: Sequence[str]) -> None:
        for sequence in sequences:
            self._logprobs.pop(sequence, None)


class SamplingRunner(ModelRunner):  # type: ignore[misc]  # transformers has no types here
    """A runner that samples after the model's step instead of within it.

    A CUDA graph repeats everything that was recorded with it, and here it records the model alone.
    Graphs run the steps that only continue sequences. Steps with prompts have ever new sizes, and
    recording takes as long as many steps.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The scores of the last step, of shape (sequences or more, vocabulary).
        self._logits: torch.Tensor | None = None

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
        if not self.pad_inputs:  # There are no graphs.
            self._logits = logits
            return
        if self._logits is None:  # All graphs share one tensor; each would keep its own.
            self._logits = logits.new_empty(self.cb_config.max_requests_per_batch, logits.shape[-1])
        self._logits[: len(logits)].copy_(logits)


def draw(scores: torch.Tensor, rows: Sequence[NextToken]) -> torch.Tensor:
    """Draw the token of each sequence, of shape (sequences,), int64.

    Scores have the shape (sequences, vocabulary), before temperature.
    """
    arguments = [row.arguments for row in rows]
    size = scores.shape[-1]
    limits = [min(values["top_k"] or size, size) for values in arguments]
    scores = scores / _on(
        scores, [[max(values["temperature"], 1e-6)] for values in arguments], torch.float32
    )
    tokens = torch.arange(size, device=scores.device).expand_as(scores)
    if min(limits) < size or any(values["top_p"] < 1 for values in arguments):
        scores, tokens = scores.topk(max(limits), dim=-1)
        limit = _on(scores, [[number] for number in limits], torch.int64)
        scores = scores.masked_fill(
            torch.arange(scores.shape[-1], device=scores.device) >= limit, -torch.inf
        )
        likely = scores.softmax(-1)
        scores = scores.masked_fill(
            likely.cumsum(-1) - likely
            >= _on(scores, [[values["top_p"]] for values in arguments], torch.float32),
            -torch.inf,
        )
    seeds = _on(scores, [[values["seed"]] for values in arguments], torch.int64)
    positions = _on(scores, [[row.position] for row in rows], torch.int64)
    return tokens.gather(
        -1, (scores + gumbel_noise(seeds, positions, tokens)).argmax(-1, keepdim=True)
    )[:, 0]


def apply_penalties(
    scores: torch.Tensor, sequences: Mapping[int, PenalizedSequence]
) -> torch.Tensor:
    """Apply penalties and biases to scores of shape (sequences, vocabulary).

    The repetition penalty is that of https://arxiv.org/abs/1909.05858; the others are those of
    OpenAI's API.

    Args:
        scores: The scores of all sequences.
        sequences: The sequences with penalties, by row.
    """
    samplings = [sequence.sampling for sequence in sequences.values()]
    penalties = [
        (sampling.repetition_penalty or 1.0, sampling.frequency_penalty, sampling.presence_penalty)
        for sampling in samplings
    ]
    rows, penalty = _on(scores, list(sequences), torch.int64), _on(scores, penalties, torch.float32)

    def cells(
        tokens: list[torch.Tensor],
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]:
        """Return the cells of each sequence's tokens, and the three penalties at each cell."""
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
    """Make a tensor on the device of the scores, without waiting for the device."""
    return torch.tensor(values, dtype=dtype).to(scores.device, non_blocking=True)


def sampling_arguments(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return the sampler's arguments for a request of the engine.

    Args:
        sampling: The parameters of the sequence.
        seed: The seed of a sequence without its own.
    """
    return {
        "temperature": float(sampling.temperature or 0),
        "top_k": min(sampling.top_k or 0, (1 << 31) - 1),
        # The most likely token always stays.
        "top_p": 1.0 if sampling.top_p is None else max(float(sampling.top_p), 1e-6),
        "seed": fold_seed(seed if sampling.seed is None else sampling.seed),
        "logprobs": sampling.top_logprobs if sampling.logprobs else -1,
        "penalized": PenalizedSequence(sampling) if sampling.changes_scores else None,
    }


def fold_seed(seed: int) -> int:
    """Fold a seed into the 31 bits that a row of the batch's inputs has for it."""
    return (seed * MIX[0] & (1 << 64) - 1) >> 33


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return noise of shape (sequences, tokens).

    It is a function of the arguments alone: the same on every device, in every batch.
    """
    start = _mix(seeds.long() * MIX[0] + positions)
    bits = _mix(start + tokens * MIX[0]) >> (64 - RANDOM_BITS) & ((1 << RANDOM_BITS) - 1)
    return -(-((bits + 0.5) / (1 << RANDOM_BITS)).log()).log()


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Apply the last steps of splitmix64 to signed numbers that wrap around."""
    numbers = (numbers ^ (numbers >> 30 & (1 << 34) - 1)) * MIX[1]
    numbers = (numbers ^ (numbers >> 27 & (1 << 37) - 1)) * MIX[2]
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)
