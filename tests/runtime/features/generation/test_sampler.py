"""The sampler: draws follow the distribution of temperature, top-k and top-p, and are reproducible."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tsx_runtime.features.generation.worker.engines.sampler import (
    NextToken,
    PenalizedSequence,
    Sampler,
    draw_tokens,
    fold_seed,
    gumbel_noise,
    sampling_arguments,
    smallest_kept,
)
from tsx_runtime.features.generation.worker.interface import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def a_state(sampling: Sampling, position: int, id: object = "a", **fields: Any) -> Any:
    """Return the state of a sequence, as the engine stores it."""
    return SimpleNamespace(
        logit_processor_kwargs=sampling_arguments(sampling, 0),
        position_offset=position,
        request_id=str(id),
        **fields,
    )


def sample(
    sampler: Sampler, states: list[Any], scores: torch.Tensor, last_tokens: list[int] | None = None
) -> torch.Tensor:
    """Return the scores of one step, in which each sequence has one token."""
    futures: Any = [
        SimpleNamespace(state=state, has_new_token=True, query_length=1) for state in states
    ]
    rows = sampler.prepare_tensor_args(
        futures, torch.empty((0, len(states) + 3), dtype=torch.int32)
    )
    return sampler(torch.tensor(last_tokens or [0] * len(states), dtype=torch.int32), scores, rows)


def draw(*requests: tuple[Sampling, int]) -> list[int]:
    """Draw the next tokens of sequences at these positions, in one batch."""
    states = [a_state(*request, index) for index, request in enumerate(requests)]
    tokens = sample(Sampler([]), states, LOGITS.repeat(len(requests), 1)).argmax(-1)
    return [int(token) for token in tokens]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0, seed=1), LOGITS.softmax(-1)),
        (Sampling(temperature=0.5, seed=2), (LOGITS / 0.5).softmax(-1)),
        (
            Sampling(temperature=1.0, top_k=3, seed=3),
            torch.cat([LOGITS[:3].softmax(-1), torch.zeros(3)]),
        ),
        (
            Sampling(temperature=1.0, top_p=0.7, seed=4),
            torch.cat([LOGITS[:2].softmax(-1), torch.zeros(4)]),
        ),
        (Sampling(temperature=1.0, top_p=0.0, seed=5), torch.eye(6)[0]),
        (Sampling(temperature=0.0, seed=6), torch.eye(6)[0]),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling, expected: torch.Tensor) -> None:
    tokens = draw(*((sampling, position) for position in range(4000)))
    shares = torch.bincount(torch.tensor(tokens), minlength=6) / 4000
    assert torch.allclose(shares, expected, atol=0.03)
    assert all(shares[token] == 0 for token in range(6) if expected[token] == 0)


def test_a_draw_depends_only_on_seed_and_position() -> None:
    sampling, another_seed = (Sampling(temperature=1.5, seed=seed) for seed in (12345, 12346))
    neighbours = [
        (Sampling(temperature=0.0), 7),
        (Sampling(temperature=0.9, top_k=2, seed=9), 3),
        (Sampling(temperature=2.0, top_p=0.5), 1),
    ]
    expected_tokens = [draw((sampling, position))[0] for position in range(50)]
    assert [
        draw(*neighbours, (sampling, position))[-1] for position in range(50)
    ] == expected_tokens
    assert [draw((another_seed, position))[0] for position in range(50)] != expected_tokens


class PenalizedBatch:
    """A batch in a sampler whose result is the scores, without drawing tokens."""

    def __init__(self, samplings: list[Sampling], prompts: list[list[int]]) -> None:
        self.sampler = Sampler([])
        self.states = [
            a_state(sampling, len(prompt), index, initial_tokens=prompt, _true_initial_tokens=0)
            for index, (sampling, prompt) in enumerate(zip(samplings, prompts, strict=True))
        ]

    def step(self, last_tokens: list[int], scores: torch.Tensor, position: int = 0) -> torch.Tensor:
        for state in self.states:
            state.position_offset = len(state.initial_tokens) + position
        return sample(self.sampler, self.states, scores, last_tokens)


def expected_scores(
    scores: torch.Tensor, sampling: Sampling, prompt: list[int], generated: list[int]
) -> torch.Tensor:
    """Apply transformers' processors, and OpenAI's definition of the other penalties."""
    tokens = torch.tensor([prompt + generated])
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(
            SequenceBiasLogitsProcessor(
                [[[token], value] for token, value in sampling.logit_bias.items()]
            )
        )
    processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty or 1.0))
    expected = processors(tokens, scores[None].clone())[0]
    for token in set(generated):
        expected[token] -= (
            generated.count(token) * sampling.frequency_penalty + sampling.presence_penalty
        )
    return expected


penalties = st.floats(-2, 2, width=32)
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    repetition_penalty=st.none() | st.floats(0.25, 8, width=32),
    logit_bias=st.none()
    | st.dictionaries(st.integers(0, 11), st.floats(-100, 100, width=32).filter(bool), min_size=1),
)


@given(
    st.lists(
        st.tuples(samplings, st.lists(st.integers(0, 11), min_size=1, max_size=6)),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
def test_scores_equal_those_of_transformers_processors_in_any_batch(
    sequences: list[tuple[Sampling, list[int]]], data: st.DataObject
) -> None:
    sequences = [*sequences, (Sampling(temperature=0.0), [1])]
    batch = PenalizedBatch(
        [sampling for sampling, _ in sequences], [prompt for _, prompt in sequences]
    )
    generated: list[list[int]] = [[] for _ in sequences]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    for step in range(3):
        scores = torch.randn(len(sequences), 12) * 4
        last_tokens = [
            tokens[-1] if tokens else prompt[-1]
            for tokens, (_, prompt) in zip(generated, sequences, strict=True)
        ]
        for _ in range(data.draw(st.integers(1, 2), label="a step may be repeated")):
            adjusted = batch.step(last_tokens, scores, step)
        expected = [
            expected_scores(row, sampling, prompt, tokens)
            for row, (sampling, prompt), tokens in zip(scores, sequences, generated, strict=True)
        ]
        torch.testing.assert_close(adjusted, torch.stack(expected))
        assert torch.equal(adjusted[-1], scores[-1])
        for tokens in generated:
            tokens.append(data.draw(st.integers(0, 11)))


def test_a_sequence_that_restarts_counts_its_earlier_tokens() -> None:
    sampling = Sampling(temperature=0.0, frequency_penalty=1.0, repetition_penalty=2.0)
    batch = PenalizedBatch([sampling], [[1, 2]])
    scores = torch.arange(12.0)[None] - 6
    for step, token in enumerate((2, 5, 5)):
        batch.step([token], scores, step)
    batch.states[0] = copy.deepcopy(batch.states[0])
    batch.states[0].initial_tokens, batch.states[0]._true_initial_tokens = [1, 2, 5, 5], 2
    assert torch.equal(
        batch.step([5], scores)[0], expected_scores(scores[0], sampling, [1, 2], [5, 5])
    )


def test_a_sequence_with_penalties_stores_no_tensor_of_vocabulary_size() -> None:
    sequence = PenalizedSequence(
        Sampling(repetition_penalty=1.1, frequency_penalty=1.0, logit_bias={3: 1.0})
    )
    state = SimpleNamespace(initial_tokens=[1, 2], _true_initial_tokens=0)
    sequence.begin_step(NextToken("a", 2, {}, state), torch.zeros(1, 5000))
    assert (
        sum(value.numel() for value in vars(sequence).values() if isinstance(value, torch.Tensor))
        == 4
    )


def test_without_penalties_the_scores_are_not_copied() -> None:
    batch = PenalizedBatch(
        [Sampling(temperature=0.0, repetition_penalty=1.0, logit_bias={})], [[1]]
    )
    scores = torch.zeros(1, 12)
    assert batch.step([1], scores) is scores


def test_logprobs_belong_to_a_position_if_a_step_is_computed_twice() -> None:
    """Repeat a step, as a sequence does that loses its cache during the step."""
    sampler = Sampler([])
    logits = {3: LOGITS, 4: LOGITS.flip(0)}
    sampling = Sampling(temperature=0.0, logprobs=True, top_logprobs=2)
    for position in (3, 4, 4):
        sample(sampler, [a_state(sampling, position)], logits[position][None])
    for position, token in ((3, 0), (4, 5)):
        logprob = sampler.take_logprobs("a", position, token, finished=position == 4)
        assert logprob is not None
        assert [logprob.token_id, logprob.top[0][0]] == [token, token]
        assert logprob.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[0]))
    assert not sampler._logprobs


def test_a_token_within_a_prompt_gets_no_next_token() -> None:
    sampler = Sampler([])
    requests: list[Any] = [
        SimpleNamespace(state=a_state(Sampling(), 5, index), has_new_token=is_last, query_length=1)
        for index, is_last in enumerate((False, True))
    ]
    for batch, is_decoding_only in ((requests[1:], True), (requests, False)):
        sampler.prepare_tensor_args(batch, torch.empty((0, 3), dtype=torch.int32))
        assert [row.sequence for row in sampler.rows] == ["1"]
        assert sampler.is_decoding_only is is_decoding_only


def test_noise_is_gumbel_and_independent_of_the_order_of_tokens() -> None:
    seeds, positions = torch.tensor([[1]]), torch.tensor([[2]])
    tokens = torch.arange(200_000)[None]
    noise = gumbel_noise(seeds, positions, tokens)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05
    assert torch.equal(gumbel_noise(seeds, positions, tokens.flip(-1)), noise.flip(-1))


def test_large_seeds_remain_different() -> None:
    seeds = [0, 1, -1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 12345678901]
    assert len({fold_seed(seed) for seed in seeds}) == len(seeds)
    assert all(0 <= fold_seed(seed) < 1 << 31 for seed in seeds)


def draw_from_sorted(scores: torch.Tensor, row: NextToken) -> int:
    """Draw by a stable sort of the whole vocabulary."""
    arguments = row.arguments
    scores, tokens = (scores / arguments["temperature"]).sort(descending=True, stable=True)
    probabilities = scores.softmax(-1)
    scores[probabilities.cumsum(-1) - probabilities >= arguments["top_p"]] = -torch.inf
    seed, position = torch.tensor([[arguments["seed"]]]), torch.tensor([[row.position]])
    return int(tokens[(scores + gumbel_noise(seed, position, tokens[None])[0]).argmax()])


@pytest.mark.parametrize("vocabulary", [6, 700, 5000])
@pytest.mark.parametrize(
    "scores_of",
    [
        pytest.param(lambda noise: noise * 6, id="peaked"),
        pytest.param(lambda noise: noise, id="broad"),
        pytest.param(lambda noise: (noise * 3).round(), id="ties"),
        pytest.param(lambda noise: (noise > 1) * 5.0, id="two values"),
        pytest.param(lambda noise: noise * 0, id="flat"),
        pytest.param(lambda noise: noise.masked_fill(noise > 0, -torch.inf), id="masked"),
    ],
)
def test_top_p_draws_as_from_the_sorted_vocabulary(vocabulary: int, scores_of: Any) -> None:
    torch.manual_seed(vocabulary)
    scores = scores_of(torch.randn(12, vocabulary))
    rows = [
        NextToken(
            str(index),
            index,
            sampling_arguments(
                Sampling(temperature=(0.7, 1.5)[index % 2], top_p=(0.11, 0.53, 0.977)[index % 3]),
                index,
            ),
            None,
        )
        for index in range(len(scores))
    ]
    expected = [draw_from_sorted(*pair) for pair in zip(scores, rows, strict=True)]
    assert draw_tokens(scores, rows).tolist() == expected


@given(st.integers(0, 10_000), st.floats(0, 8), st.floats(1e-6, 0.999))
def test_the_search_by_bits_finds_the_smallest_probability_of_top_p(
    seed: int, spread: float, top_p: float
) -> None:
    torch.manual_seed(seed)
    # In halves of powers of two, sums are exact, whatever their order is.
    powers = (torch.randint(0, 12, (3, 50)) * -spread).round().clamp(-20)
    probabilities = 2.0 ** (powers - 8)
    sorted_values = probabilities.sort(descending=True).values
    is_kept = sorted_values.cumsum(-1) - sorted_values < top_p
    expected = torch.where(
        probabilities.sum(-1, keepdim=True) < top_p,
        0.0,
        sorted_values.masked_fill(~is_kept, 1).amin(-1, keepdim=True),
    )
    assert torch.equal(smallest_kept(probabilities, torch.full((3, 1), top_p)), expected)
