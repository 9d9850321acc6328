"""A sampler for transformers' continuous batching, which draws the next tokens of a batch.

Each sequence has its own parameters. The engine takes the token with the highest score. For a
sequence that samples, the sampler first applies temperature, top-k and top-p, and then adds Gumbel
noise to the scores. The token with the highest sum is a draw from the distribution (the Gumbel-max
trick). The noise is a function of seed, position and token; therefore the same seed gives the same
text in any batch. The scores of greedy sequences do not change.

Penalties need all tokens so far. The newest token may be only on the device, since steps overlap.
Therefore the tokens of a sequence with penalties are kept on the device, and each step adds its
newest one. A step changes only the scores of these tokens. A tensor of the vocabulary's size for
each sequence would take longer than a small model.

A sequence with a grammar gets a mask after penalties and biases. The mask depends on the newest
token, which the sampler reads back from the device for such sequences only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context
from transformers.generation.logits_process import LogitsProcessorList

from tsx_runtime.features.generation.worker.engines.grammars import (
    describe_grammar_error,
    refused_tokens,
)
from tsx_runtime.features.generation.worker.interface import Sampling, TokenLogprob
from tsx_runtime.features.generation.worker.media import SequenceEmbeddings

if TYPE_CHECKING:
    from llguidance import LLMatcher

# The factors of splitmix64, as signed numbers.
SPLITMIX_FACTORS = tuple(
    factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
RANDOM_BITS = 23  # With 24 bits, the largest random number would round to 1 in fp32.
HEAD_TOKENS = 1024  # On a CPU, top-p first looks at this number of the most likely tokens.
MIN_LONG_PROMPT = 64  # From this number of tokens on, prompts are computed with more threads.
PROBABILITY_BITS = 30  # No probability has a higher bit in fp32, where 1 is 0x3F800000.
# The arguments for requests of transformers itself, which it uses to warm up.
GREEDY_ARGUMENTS: dict[str, Any] = {
    "temperature": 0.0,
    "logprobs": -1,
    "penalized": None,
    "grammar": None,
    "media": None,
}


class NextToken(NamedTuple):
    """A row of the scores: a sequence whose next token is chosen.

    Attributes:
        sequence: The name of the sequence.
        position: The number of its tokens so far.
        arguments: The `sampling_arguments` of the sequence.
        state: The engine's state of the sequence.
    """

    sequence: str
    position: int
    arguments: dict[str, Any]
    state: Any


class PenalizedSequence:
    """A sequence with penalties or biases.

    Attributes:
        prompt: The number of tokens of the prompt.
        tokens: The tokens of the prompt and the generated text.
        biased: The tokens that have a bias.
        biases: The biases of these tokens.
    """

    prompt: int
    tokens: torch.Tensor
    biased: torch.Tensor
    biases: torch.Tensor

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._position = 0

    # transformers copies the arguments when the sequence loses its cache.
    def __deepcopy__(self, memo: Any) -> PenalizedSequence:
        return self

    def begin_step(self, row: NextToken, scores: torch.Tensor) -> bool:
        """Tell whether the newest token of the row must be added to `tokens`.

        It was added already if a step is repeated, which then has the same position.
        """
        tokens, last_position, self._position = (
            row.state.initial_tokens,
            self._position,
            row.position,
        )
        if row.position != len(tokens):
            return row.position > last_position
        # The sequence begins, or begins again after it has lost its cache. In the second case, its
        # initial tokens include generated ones.
        self.prompt = row.state._true_initial_tokens or len(tokens)
        self.tokens = _to_device(scores, tokens, torch.int64)
        biases = self.sampling.logit_bias or {}
        self.biased = _to_device(scores, list(biases), torch.int64)
        self.biases = _to_device(scores, list(biases.values()), torch.float32)
        return False


class GrammarSequence:
    """A sequence that follows a grammar.

    Attributes:
        matcher: The state of the grammar after the tokens so far.
        error: Why the grammar has ended before its text; None if it has not.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.error: str | None = None
        self._position = 0

    # transformers copies the arguments when the sequence loses its cache.
    def __deepcopy__(self, memo: Any) -> GrammarSequence:
        return self

    def begin_step(self, row: NextToken, newest_token: int) -> None:
        """Pass the tokens since the last step to the grammar; a repeated step has none."""
        initial_tokens = row.state.initial_tokens
        if row.position == len(initial_tokens):
            # The sequence begins, or begins again after it has lost its cache.
            self.matcher.reset()
            prompt = row.state._true_initial_tokens or len(initial_tokens)
            self.matcher.consume_tokens(initial_tokens[prompt:])
        elif row.position > self._position:
            self.matcher.consume_token(newest_token)
        self._position = row.position


class Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # an untyped base
    """The processors of an engine: first those of the model's configuration, then the sampling."""

    def __init__(self, processors: list[Any], prompt_threads: int | None = None) -> None:
        """Create the sampler.

        Args:
            processors: The processors of the model's configuration.
            prompt_threads: The number of torch's threads for batches with long prompts; None means
                the same as for other batches.
        """
        super().__init__(LogitsProcessorList(processors))
        self.prompt_threads = prompt_threads
        self.rows: list[NextToken] = []  # the sequences of the batch
        # Returns the newest tokens of the rows, if the runner has copied them from the device.
        self.read_tokens: Callable[[], list[int]] | None = None
        self.is_decoding_only = False  # Each sequence has one token, and gets the next.
        self.prompt_tokens = 0  # the tokens of prompts in the batch
        # The embeddings of parts of prompts with media, each with the index of its first token.
        self.embeddings: list[tuple[int, torch.Tensor]] = []
        # keys: sequence, then position
        self._logprobs: defaultdict[str, dict[int, tuple[torch.Tensor, Any]]] = defaultdict(dict)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept all arguments, since they come from `sampling_arguments`."""

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        self.rows = [
            NextToken(
                state.request_id,
                state.position_offset,
                _arguments_of(state),
                state,
            )
            for state in states
        ]
        self.embeddings = list(_prompt_embeddings(requests_in_batch))
        self.prompt_tokens = sum(
            request.query_length for request in requests_in_batch if request.query_length > 1
        )
        self.is_decoding_only = (
            not self.embeddings
            and not self.prompt_tokens
            and len(self.rows) == len(requests_in_batch)
        )
        super().prepare_tensor_args(requests_in_batch, arg_storage)
        return arg_storage

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: torch.Tensor
    ) -> torch.Tensor:
        """Return scores in which the next token of each sequence has the highest score.

        Scores have the shape (sequences, vocabulary), in fp32.
        """
        model_scores = super().__call__(input_ids, scores, logits_processor_args)
        scores = self._mask(input_ids, self._penalize(input_ids, model_scores))
        sampling_rows = [
            (index, row) for index, row in enumerate(self.rows) if row.arguments["temperature"] > 0
        ]
        if sampling_rows:
            row_indexes = _to_device(scores, [index for index, _ in sampling_rows], torch.int64)
            drawn_tokens = draw_tokens(scores[row_indexes], [row for _, row in sampling_rows])
            scores = scores.index_fill(0, row_indexes, -torch.inf)
            scores[row_indexes, drawn_tokens] = 0.0
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
        """Apply penalties; `tokens` of shape (sequences,) are the newest tokens of the rows."""
        penalized_rows = [
            (index, row, sequence)
            for index, row in enumerate(self.rows)
            if (sequence := row.arguments["penalized"]) is not None
        ]
        if not penalized_rows:
            return scores
        for index, row, sequence in penalized_rows:
            if sequence.begin_step(row, scores):
                sequence.tokens = torch.cat([sequence.tokens, tokens[index, None].long()])
        return apply_penalties(scores, {index: sequence for index, _, sequence in penalized_rows})

    def _mask(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Exclude the tokens that the grammars do not allow."""
        grammar_rows = [
            (index, row, sequence)
            for index, row in enumerate(self.rows)
            if (sequence := row.arguments["grammar"]) is not None
        ]
        if not grammar_rows:
            return scores
        newest_tokens = self.read_tokens() if self.read_tokens else tokens.tolist()
        for index, row, sequence in grammar_rows:
            sequence.begin_step(row, newest_tokens[index])
        refused = refused_tokens(
            [sequence.matcher for *_, sequence in grammar_rows], scores.shape[-1]
        )
        for *_, sequence in grammar_rows:
            if sequence.error is None and sequence.matcher.is_error():
                sequence.error = describe_grammar_error(sequence.matcher)
        refused = refused.to(scores.device, non_blocking=True)
        if len(grammar_rows) == len(self.rows):
            return scores.masked_fill(refused, -torch.inf)
        row_indexes = _to_device(scores, [index for index, *_ in grammar_rows], torch.int64)
        return scores.index_copy(
            0, row_indexes, scores[row_indexes].masked_fill(refused, -torch.inf)
        )

    def take_logprobs(
        self, sequence: str, position: int, token: int, finished: bool
    ) -> TokenLogprob | None:
        """Return the log probabilities of the token at a position of a sequence.

        They are computed from the model's scores, without temperature and noise.
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
    """A runner that samples after the model's step, so that CUDA graphs record only the model.

    A graph would repeat the same sampling at each step. Graphs are used only for steps without
    prompts: steps with prompts have new sizes again and again, and recording a graph takes as long
    as many steps.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The scores of the last step, of shape (sequences or more, vocabulary).
        self._logits: torch.Tensor | None = None

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        rows = self.logit_processor.rows
        if any(row.arguments["grammar"] is not None for row in rows):
            self.logit_processor.read_tokens = self._copy_newest_tokens(batch_data, len(rows))
        prompt_threads = self.logit_processor.prompt_threads
        if prompt_threads and self.logit_processor.prompt_tokens >= MIN_LONG_PROMPT:
            threads = torch.get_num_threads()
            torch.set_num_threads(prompt_threads)
            super().compute_batch(model, batch_data)
            torch.set_num_threads(threads)
        else:
            super().compute_batch(model, batch_data)
        count = len(rows)
        if not count or self._logits is None:
            return
        with stream_context(self.inputs_and_outputs.compute_stream):
            tokens = batch_data["input_ids"][0]
            if not self.logit_processor.is_decoding_only:
                tokens = tokens[batch_data["logits_indices"]]
            scores = self.logit_processor(
                tokens[:count],
                self._logits[:count].float(),
                batch_data["logits_processor_args"][:, :count],
            )
            *_, output_ids = self.inputs_and_outputs.get_cb_kwargs()
            self._sample(scores[None], output_ids)

    def _copy_newest_tokens(
        self, batch_data: dict[str, Any], count: int
    ) -> Callable[[], list[int]] | None:
        """Copy the newest token of each row from a GPU.

        The copy waits only for the previous step, so that masks are computed while the model runs.
        """
        stream = self.inputs_and_outputs.compute_stream
        if stream is None:
            return None
        with stream_context(stream):
            carry_over_ids, previous_output_ids, _ = self.inputs_and_outputs.get_cb_kwargs()
            # The model's step does the same again, with the same result.
            self.inputs_and_outputs.carry_over_tokens(
                batch_data["input_ids"], carry_over_ids, previous_output_ids
            )
            tokens = batch_data["input_ids"][0, batch_data["logits_indices"][:count]]
            copied_tokens = torch.empty(count, dtype=tokens.dtype, pin_memory=True)
            copied_tokens.copy_(tokens, non_blocking=True)
            copied = stream.record_event()

        def read() -> list[int]:
            copied.synchronize()
            return copied_tokens.tolist()

        return read

    def _get_forward_fn(self, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        forward, use_graph = super()._get_forward_fn(use_block_table)
        return forward, use_graph and self.logit_processor.is_decoding_only

    def _forward_process_and_sample(
        self, model: Any, batch_data: dict[str, Any], *tokens: torch.Tensor
    ) -> None:
        carry_over_ids, previous_output_ids, _ = tokens
        self.inputs_and_outputs.carry_over_tokens(
            batch_data["input_ids"], carry_over_ids, previous_output_ids
        )
        inputs = batch_data
        if self.logit_processor.embeddings:
            inputs = {name: value for name, value in batch_data.items() if name != "input_ids"}
            rows = model.get_input_embeddings()(batch_data["input_ids"])
            for start, part in self.logit_processor.embeddings:
                rows[0, start : start + len(part)] = part
            inputs["inputs_embeds"] = rows
        selects_rows = self.pad_inputs or not self.logit_processor.is_decoding_only
        if not selects_rows:
            inputs.pop("logits_to_keep", None)
        logits = model(**inputs).logits[0]
        if selects_rows and "logits_to_keep" not in inputs:
            logits = logits[batch_data["logits_indices"]]
        if not self.pad_inputs:  # Without graphs, inputs are not padded.
            self._logits = logits
            return
        # All graphs write to one tensor, so that not each of them needs its own.
        if self._logits is None:
            self._logits = logits.new_empty(self.cb_config.max_requests_per_batch, logits.shape[-1])
        self._logits[: len(logits)].copy_(logits)


def _arguments_of(state: Any) -> dict[str, Any]:
    """Return the `sampling_arguments` of the engine's state of a sequence."""
    return state.logit_processor_kwargs or GREEDY_ARGUMENTS


def _prompt_embeddings(requests_in_batch: list[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the embeddings in a batch, each with the index of its first token."""
    start = 0
    for request in requests_in_batch:
        media, end = _arguments_of(request.state)["media"], request.state.position_offset
        if media is not None and media.rows is not None:
            # Tokens after the prompt have no rows.
            part = media.rows[end - request.query_length : end]
            if len(part):
                yield start, part
        start += request.query_length


def draw_tokens(scores: torch.Tensor, rows: Sequence[NextToken]) -> torch.Tensor:
    """Draw a token for each sequence; the result has the shape (sequences,), int64.

    Scores have the shape (sequences, vocabulary), before temperature. Sequences are drawn together
    with those that have the same kinds of limits, so that none sorts more tokens than it needs.
    """
    row_indexes = defaultdict(list)
    for index, row in enumerate(rows):
        has_top_k = 0 < row.arguments["top_k"] < scores.shape[-1]
        row_indexes[has_top_k, row.arguments["top_p"] < 1].append(index)
    drawn_tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    for indexes in row_indexes.values():
        group = _to_device(scores, indexes, torch.int64)
        drawn_tokens[group] = _draw_alike(scores[group], [rows[index] for index in indexes])
    return drawn_tokens


def _draw_alike(scores: torch.Tensor, rows: Sequence[NextToken]) -> torch.Tensor:
    """Draw the tokens of sequences that all have a top-k or none, and a top-p or none."""
    arguments = [row.arguments for row in rows]
    vocabulary_size = scores.shape[-1]
    top_k_limits = [
        min(values["top_k"] or vocabulary_size, vocabulary_size) for values in arguments
    ]
    scores = scores / _to_device(
        scores, [[max(values["temperature"], 1e-6)] for values in arguments], torch.float32
    )
    tokens = torch.arange(vocabulary_size, device=scores.device).expand_as(scores)
    top_p = _to_device(scores, [[values["top_p"]] for values in arguments], torch.float32)
    if min(top_k_limits) < vocabulary_size:
        scores, tokens = scores.topk(max(top_k_limits), dim=-1)
        row_limits = _to_device(scores, [[number] for number in top_k_limits], torch.int64)
        scores = scores.masked_fill(
            torch.arange(scores.shape[-1], device=scores.device) >= row_limits, -torch.inf
        )
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, -torch.inf)
    elif arguments[0]["top_p"] < 1:
        scores, tokens = _apply_top_p(scores, tokens, top_p)
    seeds = _to_device(scores, [[values["seed"]] for values in arguments], torch.int64)
    positions = _to_device(scores, [[row.position] for row in rows], torch.int64)
    return tokens.gather(
        -1, (scores + gumbel_noise(seeds, positions, tokens)).argmax(-1, keepdim=True)
    )[:, 0]


def _apply_top_p(
    scores: torch.Tensor, tokens: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask the scores of tokens outside top-p; on a CPU, leave most of these tokens out.

    A token is kept if the more likely tokens have together less than top-p; among equally likely
    tokens, smaller ids come first.
    """
    probabilities = scores.softmax(-1)
    if scores.device.type == "cpu":
        for size in (HEAD_TOKENS, scores.shape[-1]):
            head = probabilities.topk(min(size, scores.shape[-1]))
            is_kept = head.values.cumsum(-1) - head.values < top_p
            smallest = head.values.masked_fill(~is_kept, 1).amin(-1, keepdim=True)
            if (head.values[:, -1:] < smallest).all():
                tokens = head.indices.sort(-1).values
                scores, probabilities = scores.gather(-1, tokens), probabilities.gather(-1, tokens)
                break
    else:
        smallest = smallest_kept(probabilities, top_p)
    missing = top_p - probabilities.where(probabilities > smallest, 0).sum(-1, keepdim=True)
    ties = probabilities == smallest
    is_masked = (probabilities < smallest) | (ties & ((ties.cumsum(-1) - 1) * smallest >= missing))
    return scores.masked_fill(is_masked, -torch.inf), tokens


def smallest_kept(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the smallest probability in each row's top-p, both of shape (rows, 1).

    The search goes bit by bit, because the bits of positive numbers have the order of the numbers.
    Unlike a search among sorted rows, it does not wait for a GPU.
    """
    bits = probabilities.view(torch.int32)
    smallest = torch.zeros_like(bits[:, :1])
    for bit in reversed(range(PROBABILITY_BITS)):
        larger = smallest | 1 << bit
        total = probabilities.where(bits >= larger, 0).sum(-1, keepdim=True)
        smallest = larger.where(total >= top_p, smallest)
    return smallest.view(torch.float32)


def apply_penalties(
    scores: torch.Tensor, sequences: Mapping[int, PenalizedSequence]
) -> torch.Tensor:
    """Apply penalties and biases to scores of shape (sequences, vocabulary).

    The repetition penalty is defined in https://arxiv.org/abs/1909.05858, and the others in
    OpenAI's API.

    Args:
        scores: The scores of all sequences.
        sequences: The sequences with penalties, by their row in the scores.
    """
    samplings = [sequence.sampling for sequence in sequences.values()]
    penalties = [
        (sampling.repetition_penalty or 1.0, sampling.frequency_penalty, sampling.presence_penalty)
        for sampling in samplings
    ]
    row_indexes, penalty_tensor = (
        _to_device(scores, list(sequences), torch.int64),
        _to_device(scores, penalties, torch.float32),
    )

    def cells(
        tokens: list[torch.Tensor],
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]:
        """Return the cells of each sequence's tokens, and the three penalties at each cell."""
        sizes = [len(part) for part in tokens]
        sequence_indexes = torch.arange(len(sizes), device=scores.device)
        sequence_indexes = sequence_indexes.repeat_interleave(
            _to_device(scores, sizes, torch.int64), output_size=sum(sizes)
        )
        return (row_indexes[sequence_indexes], torch.cat(tokens)), penalty_tensor[
            sequence_indexes
        ].unbind(1)

    biased_cells, _ = cells([sequence.biased for sequence in sequences.values()])
    scores = scores.index_put(
        biased_cells,
        torch.cat([sequence.biases for sequence in sequences.values()]),
        accumulate=True,
    )
    # A token that occurs several times is written several times, always with the same value.
    seen_cells, (repetition, *_) = cells([sequence.tokens for sequence in sequences.values()])
    scores[seen_cells] = torch.where(
        scores[seen_cells] < 0, scores[seen_cells] * repetition, scores[seen_cells] / repetition
    )
    generated_cells, (_, frequency, presence) = cells(
        [sequence.tokens[sequence.prompt :] for sequence in sequences.values()]
    )
    scores[generated_cells] -= presence
    return scores.index_put_(generated_cells, -frequency, accumulate=True)


def _to_device(scores: torch.Tensor, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    """Create a tensor on the device of the scores, without waiting for the device."""
    return torch.tensor(values, dtype=dtype).to(scores.device, non_blocking=True)


def sampling_arguments(
    sampling: Sampling,
    seed: int,
    grammar: GrammarSequence | None = None,
    media: SequenceEmbeddings | None = None,
) -> dict[str, Any]:
    """Return the sampler's arguments for a request of the engine.

    Args:
        sampling: The parameters of the sequence.
        seed: The seed to use if the request has none.
        grammar: The grammar of the sequence.
        media: The embeddings of the prompt, if it has images or sounds.
    """
    return {
        "temperature": float(sampling.temperature or 0),
        "top_k": min(sampling.top_k or 0, (1 << 31) - 1),
        # With a top_p above 0, the most likely token always remains.
        "top_p": 1.0 if sampling.top_p is None else max(float(sampling.top_p), 1e-6),
        "seed": fold_seed(seed if sampling.seed is None else sampling.seed),
        "logprobs": sampling.top_logprobs if sampling.logprobs else -1,
        "penalized": PenalizedSequence(sampling) if sampling.changes_scores else None,
        "grammar": grammar,
        "media": media,
    }


def fold_seed(seed: int) -> int:
    """Reduce a seed to 31 bits, the size of its field in the inputs of a batch."""
    return (seed * SPLITMIX_FACTORS[0] & (1 << 64) - 1) >> 33


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return noise of shape (sequences, tokens).

    It depends only on the arguments, and is equal on every device and in every batch.
    """
    state = _mix_bits(seeds.long() * SPLITMIX_FACTORS[0] + positions)
    bits = _mix_bits(state + tokens * SPLITMIX_FACTORS[0]) >> (64 - RANDOM_BITS) & (
        (1 << RANDOM_BITS) - 1
    )
    return -(-((bits + 0.5) / (1 << RANDOM_BITS)).log()).log()


def _mix_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Apply the last steps of splitmix64 to signed numbers that wrap around."""
    numbers = (numbers ^ (numbers >> 30 & (1 << 34) - 1)) * SPLITMIX_FACTORS[1]
    numbers = (numbers ^ (numbers >> 27 & (1 << 37) - 1)) * SPLITMIX_FACTORS[2]
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)
