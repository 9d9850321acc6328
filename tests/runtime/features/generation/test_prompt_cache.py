"""Prompts with equal beginnings and salts are computed once, without a change of the answer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.features.generation.conftest import Run
from tests.runtime.features.generation.test_transformers_engine import (
    TEXTS,
    generate,
    greedy,
    ids,
    model_of,
    small_pages,
    started,
)
from tsx_runtime.features.generation.worker.engines import transformers_engine
from tsx_runtime.features.generation.worker.engines.prompt_cache import add_salt, sequence_name
from tsx_runtime.features.generation.worker.engines.transformers_engine import TransformersEngine
from tsx_runtime.features.generation.worker.interface import Media, Sampling

PAGE = 16
PREFIX = "In the face of ambiguity, refuse the temptation to guess. " * 3
pytestmark = small_pages


async def answer(
    engine: TransformersEngine, text: str, sampling: Sampling, media: bytes = b""
) -> tuple[list[int], list[float], int]:
    """Return the tokens of an answer, their logprobs, and the number of cached tokens."""
    stream = engine.generate(ids(text), sampling, Media({}, media) if media else None)
    steps = [tokens async for tokens in stream]
    assert not any(tokens.cached_tokens for tokens in steps[1:])
    return (
        [id for tokens in steps for id in tokens.token_ids],
        [token.logprob for tokens in steps for token in tokens.logprobs],
        steps[0].cached_tokens,
    )


def with_logprobs(**options: Any) -> Sampling:
    return greedy(8, logprobs=True, **options)


@pytest.fixture(scope="module")
def engine(llama: Path, run: Run) -> Any:
    with started(run, llama) as engine:
        yield engine


def test_a_common_beginning_is_found_and_does_not_change_the_answer(
    engine: TransformersEngine, run: Run, llama: Path
) -> None:
    text, other_text = PREFIX + TEXTS[0], PREFIX + TEXTS[1]
    pairs = enumerate(zip(ids(text), ids(other_text), strict=False))
    common = next(index for index, (first, second) in pairs if first != second)
    tokens, logprobs, cached = run(answer(engine, text, with_logprobs()))
    assert (tokens, cached) == (generate(model_of(llama), text, greedy(8)), 0)
    again = run(answer(engine, text, with_logprobs()))
    assert (again[0], again[2]) == (tokens, (len(ids(text)) - 1) // PAGE * PAGE)
    assert again[1] == pytest.approx(logprobs, abs=1e-4)
    assert run(answer(engine, other_text, greedy(1)))[2] == common // PAGE * PAGE > 0
    assert run(answer(engine, f"x{PREFIX}", greedy(1)))[2] == 0


def test_sequences_with_different_salts_or_media_share_nothing(
    engine: TransformersEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This model reads text only, so its media change nothing.
    monkeypatch.setattr(
        transformers_engine,
        "embed_prompt",
        lambda model, prompt, features: model.get_input_embeddings()(torch.tensor(prompt)),
    )
    ann, bob = with_logprobs(cache_salt="ann"), with_logprobs(cache_salt="bob")
    first = run(answer(engine, PREFIX, ann))
    for sampling, media in ((bob, b""), (ann, b"picture"), (bob, b"picture"), (ann, b"sound")):
        tokens, logprobs, cached = run(answer(engine, PREFIX, sampling, media))
        assert (tokens, cached) == (first[0], 0)
        assert logprobs == pytest.approx(first[1], abs=1e-4)
    assert run(answer(engine, PREFIX, ann))[2] > 0
    assert run(answer(engine, PREFIX, ann, b"picture"))[2] > 0


def test_a_client_that_leaves_does_not_spoil_its_prompt_for_others(
    engine: TransformersEngine, run: Run, llama: Path
) -> None:
    text = f"{PREFIX}{TEXTS[3]}"

    async def leave_after(steps: int) -> None:
        async with aclosing(engine.generate(ids(text), greedy(30))) as stream:
            for _ in range(steps):
                await anext(stream)

    for steps in (0, 1, 20):
        run(leave_after(steps))
    tokens, _, cached = run(answer(engine, text, greedy(24)))
    assert tokens == generate(model_of(llama), text, greedy(24))
    assert cached > 0
    assert not engine._engines[None]._cache.cached_tokens


@pytest.mark.nightly
def test_adapters_do_not_use_each_others_cache(
    llama: Path, adapters: dict[str, Path], run: Run
) -> None:
    names = (None, "polite", "terse")
    with started(run, llama, adapters) as engine:
        first = [run(answer(engine, PREFIX, greedy(12, adapter=name))) for name in names]
        again = [run(answer(engine, PREFIX, greedy(12, adapter=name))) for name in names]
    assert [cached for _, _, cached in first] == [0, 0, 0]
    assert all(cached for _, _, cached in again)
    assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in first]
    assert first[0][0] != first[1][0] != first[2][0] != first[0][0]


@pytest.mark.nightly
def test_sequences_that_lose_their_cache_and_share_a_beginning_stay_correct(
    llama: Path, run: Run
) -> None:
    model = model_of(llama)
    with started(run, llama, max_sequences=3, cache_memory=61_000) as engine:
        scheduler = engine._engines[None]._manager.batch_processor.scheduler
        texts = [PREFIX[:40] + text for text in TEXTS[:3]]
        requests = [(text, engine.context_length - len(ids(text))) for text in texts]

        async def together() -> tuple[list[list[int]], int]:
            tasks = [asyncio.create_task(answer(engine, text, greedy(n))) for text, n in requests]
            lost: set[str] = set()
            while not all(task.done() for task in tasks):
                waiting = [*scheduler.waiting_requests.values()]
                lost |= {state.request_id for state in waiting if state._true_initial_tokens}
                await asyncio.sleep(0.001)  # The thread of steps needs the interpreter.
            return [task.result()[0] for task in tasks], len(lost)

        answers, lost = run(together())
    assert lost
    assert answers == [generate(model, text, greedy(n)) for text, n in requests]


def test_a_full_cache_forgets_the_prompts_that_were_used_longest_ago(llama: Path, run: Run) -> None:
    with started(run, llama, max_sequences=2, cache_memory=121_000) as engine:
        cache = engine._engines[None]._cache
        evictions = 0
        for number in range(40):
            assert run(answer(engine, PREFIX, greedy(2)))[2] or number == 0
            free = cache.compute_free_capacity()
            run(answer(engine, f"{number:04} {TEXTS[3]}", greedy(2)))
            evictions += cache.compute_free_capacity() > free
        assert evictions > 2
        assert cache.evict_cached_blocks()
        while cache.evict_cached_blocks():
            pass
        assert cache.compute_free_capacity() == 1
        assert engine.stats() == (0, 0, 0.0)


def test_only_the_first_tokens_are_mixed_with_the_salt() -> None:
    tokens = list(range(40))
    names = [
        sequence_name(1, b"a", b"b"),
        sequence_name(2, b"a", b"b"),
        sequence_name(3, b"ab", b""),
    ]
    salted = [add_salt(name, tokens) for name in names]
    assert salted[0] == salted[1] != salted[2]
    assert all(values[8:] == tokens[8:] for values in salted)
    assert all(-(1 << 31) <= value < 1 << 31 for values in salted for value in values)
    assert all(value != token for value, token in zip(salted[0][:8], salted[2][:8], strict=True))
    assert add_salt("__warmup_0__", tokens) == tokens
