"""transformers' continuous batching as an engine: the tokens of `generate`, whoever joins and
leaves, and no cache is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from tests.runtime.worker.generation.conftest import Run
from tests.support.language_models import CONTEXT, bpe_tokenizer
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.errors import Unavailable
from tsx_runtime.worker.exceptions import EngineDied, LoadError
from tsx_runtime.worker.generation.interface import Sampling
from tsx_runtime.worker.generation.transformers_engine import TransformersEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
small_pages = pytest.mark.skipif(
    DEVICE == "cuda", reason="a page of a GPU's cache is as large as this model's context"
)
TEXTS = (
    "Beautiful is better",
    "a",
    "def wrap(text, width=70):",
    "Now is better than never. " * 4,
    "In the face of ambiguity, refuse",
)
GREEDY = Sampling(max_tokens=24, temperature=0.0)
DRAWN = Sampling(max_tokens=24, temperature=0.9, top_p=0.95, top_k=40, seed=7)


def model_of(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).to(DEVICE)


def ids(text: str) -> list[int]:
    return list(bpe_tokenizer()(text)["input_ids"])


async def collect(
    engine: TransformersEngine, prompt: Sequence[int], sampling: Sampling
) -> tuple[list[int], str | None]:
    found: list[int] = []
    async for tokens in engine.generate(prompt, sampling):
        found += tokens.token_ids
    return found, tokens.finished


async def until_running(engine: TransformersEngine, sequences: int) -> None:
    """Asked again at each turn of the loop, which the engine's own results make."""
    while engine.stats().running < sequences:  # noqa: ASYNC110  # an engine has no event for it
        await asyncio.sleep(0)


def start(
    run: Run, model: Any, adapters: dict[str, Path] | None = None, **limits: Any
) -> TransformersEngine:
    engine = TransformersEngine(
        model, adapters or {}, HuggingFaceConfig(**limits), [bpe_tokenizer().eos_token_id]
    )
    run(engine.start())
    return engine


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return model_of(llama)


@pytest.fixture(scope="module")
def engine(llama: Path, run: Run) -> Iterator[TransformersEngine]:
    engine = start(run, model_of(llama))
    yield engine
    run(engine.close())


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    prompts = [ids(text) for text in TEXTS]
    found = [
        model.generate(torch.tensor([prompt], device=DEVICE), max_new_tokens=24, do_sample=False)[0]
        for prompt in prompts
    ]
    return [each[len(prompt) :].tolist() for each, prompt in zip(found, prompts, strict=True)]


def test_the_tokens_are_those_of_generate(
    engine: TransformersEngine, run: Run, wanted: list[list[int]]
) -> None:
    assert [run(collect(engine, ids(text), GREEDY))[0] for text in TEXTS] == wanted


def test_sequences_that_join_and_leave_change_no_others(
    engine: TransformersEngine, run: Run, wanted: list[list[int]]
) -> None:
    async def leave_early(text: str) -> None:
        async with aclosing(engine.generate(ids(text), DRAWN)) as stream:
            async for _ in stream:
                return

    async def together() -> list[list[int]]:
        tasks: list[Any] = []
        for text in TEXTS:
            tasks.append(asyncio.create_task(collect(engine, ids(text), GREEDY)))
            await leave_early(
                f"{text} or not"
            )  # the next begins while those before it are under way
        return [(await task)[0] for task in tasks]

    assert run(together()) == wanted


def test_a_seed_repeats_an_answer_whoever_shares_the_batch(
    engine: TransformersEngine, run: Run
) -> None:
    async def beside_others() -> list[int]:
        others = [
            collect(engine, ids(text), sampling)
            for text in TEXTS
            for sampling in (GREEDY, Sampling(max_tokens=9, temperature=1.3))
        ]
        return (await asyncio.gather(collect(engine, ids(TEXTS[0]), DRAWN), *others))[0][0]

    alone, _ = run(collect(engine, ids(TEXTS[0]), DRAWN))
    assert run(beside_others()) == alone
    assert (
        run(collect(engine, ids(TEXTS[0]), Sampling(max_tokens=24, temperature=0.9, seed=8)))[0]
        != alone
    )


PENALIZED = (
    Sampling(max_tokens=24, temperature=0.0, repetition_penalty=1.7),
    Sampling(max_tokens=24, temperature=0.0, frequency_penalty=1.5, presence_penalty=-0.5),
    Sampling(max_tokens=24, temperature=0.0, logit_bias={7: 3.0, 90: -100.0, 12: 2.5}),
    Sampling(
        max_tokens=24,
        temperature=0.0,
        repetition_penalty=0.8,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        logit_bias={5: 4.0, 33: 6.0},
    ),
)


class OpenAIPenalties(LogitsProcessor):  # type: ignore[misc]  # transformers has no types here
    """The definition in OpenAI's API reference, of which transformers has no processor."""

    def __init__(self, prompt: int, sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = input_ids[0, self.prompt :].bincount(minlength=scores.shape[-1])
        return (
            scores
            - counts * self.sampling.frequency_penalty
            - (counts > 0) * self.sampling.presence_penalty
        )


def generate(model: Any, prompt: list[int], sampling: Sampling) -> list[int]:
    """What transformers' own `generate` continues, with its own processors for what it has."""
    bias = (
        None
        if sampling.logit_bias is None
        else [[[token], value] for token, value in sampling.logit_bias.items()]
    )
    found = model.generate(
        torch.tensor([prompt], device=DEVICE),
        max_new_tokens=sampling.max_tokens,
        do_sample=False,
        sequence_bias=bias,
        repetition_penalty=sampling.repetition_penalty,
        logits_processor=[OpenAIPenalties(len(prompt), sampling)],
    )
    return list(found[0][len(prompt) :].tolist())


def test_penalties_and_biases_are_those_of_generate_alone_and_beside_others(
    engine: TransformersEngine, run: Run, model: Any, wanted: list[list[int]]
) -> None:
    requests = [(ids(text), sampling) for text in TEXTS for sampling in PENALIZED]
    expected = [generate(model, *request) for request in requests]
    plain = [tokens for tokens in wanted for _ in PENALIZED]
    assert [found == tokens for found, tokens in zip(expected, plain, strict=True)].count(
        True
    ) < len(requests) // 4
    assert [run(collect(engine, *request))[0] for request in requests] == expected

    async def together() -> list[list[int]]:
        others = [
            collect(engine, ids(text), sampling) for text in TEXTS for sampling in (GREEDY, DRAWN)
        ]
        both = await asyncio.gather(*(collect(engine, *request) for request in requests), *others)
        return [found for found, _ in both]

    found = run(together())
    assert found[: len(requests)] == expected
    assert found[len(requests) :: 2] == wanted


@small_pages
def test_a_sequence_that_loses_its_cache_keeps_its_penalties(
    llama: Path, run: Run, model: Any
) -> None:
    """Three sequences that do not fit the cache together: the engine takes the cache of some of
    them away for a while.
    """
    engine = start(run, model_of(llama), max_sequences=3, cache_memory=300_000)
    requests = [
        (ids(text), replace(PENALIZED[1], max_tokens=engine.context_length - len(ids(text))))
        for text in TEXTS[:3]
    ]
    scheduler = engine._lanes[None]._manager.batch_processor.scheduler

    async def together() -> tuple[list[list[int]], int]:
        tasks = [asyncio.create_task(collect(engine, *request)) for request in requests]
        lost: set[str] = set()
        while not all(task.done() for task in tasks):
            states = [*scheduler.waiting_requests.values()]
            lost |= {state.request_id for state in states if state._true_initial_tokens}
            await asyncio.sleep(0)
        return [task.result()[0] for task in tasks], len(lost)

    try:
        found, lost = run(together())
        assert lost
        assert found == [generate(model, *request) for request in requests]
    finally:
        run(engine.close())


def test_logprobs_are_those_of_the_model(engine: TransformersEngine, run: Run, model: Any) -> None:
    async def read() -> list[Any]:
        stream = engine.generate(
            ids(TEXTS[0]),
            Sampling(max_tokens=3, temperature=1.5, seed=3, logprobs=True, top_logprobs=2),
        )
        return [tokens async for tokens in stream]

    prompt = ids(TEXTS[0])
    for tokens in run(read()):
        (told,) = tokens.logprobs
        expected = model(torch.tensor([prompt], device=DEVICE)).logits[0, -1].log_softmax(-1)
        top = expected.topk(2)
        assert told.token_id == tokens.token_ids[0]
        assert told.logprob == pytest.approx(expected[told.token_id].item(), abs=1e-4)
        assert [id for id, _ in told.top] == top.indices.tolist()
        assert [logprob for _, logprob in told.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        prompt.append(told.token_id)


def test_the_token_that_ends_texts_ends_the_sequence(
    engine: TransformersEngine, run: Run, wanted: list[list[int]]
) -> None:
    lane = engine._lanes[None]
    end = wanted[0][5]
    lane.end_tokens, lane._router._end_tokens, before = (
        [end],
        frozenset([end]),
        (lane.end_tokens, lane._router._end_tokens),
    )
    try:
        found = run(collect(engine, ids(TEXTS[0]), GREEDY))
    finally:
        lane.end_tokens, lane._router._end_tokens = before
    assert found == (wanted[0][: wanted[0].index(end) + 1], "stop")


def test_closing_frees_the_cache_within_a_step(engine: TransformersEngine, run: Run) -> None:
    async def leave() -> tuple[Any, Any, int, int]:
        processor = engine._lanes[None]._manager
        stream = engine.generate(ids(TEXTS[3]), Sampling(max_tokens=200, temperature=0.0))
        for _ in range(3):
            await anext(stream)
        while_open, step = engine.stats(), processor.current_batch
        await stream.aclose()
        return while_open, engine.stats(), step, processor.current_batch

    before, after, step, last = run(leave())
    assert (before.running, before.waiting) == (1, 0)
    assert before.cache_use > 0
    assert after == (0, 0, 0.0)
    assert last - step <= 2  # the one that ran, and one that had begun


def test_a_hundred_clients_that_leave_lose_no_cache(engine: TransformersEngine, run: Run) -> None:
    async def client(number: int) -> None:
        async with aclosing(
            engine.generate(ids(TEXTS[number % 5]), Sampling(max_tokens=200, temperature=1.0))
        ) as stream:
            read = 0
            async for _ in stream:
                read += 1
                if read == 3:
                    return

    async def all_of_them() -> None:
        await asyncio.gather(*map(client, range(100)))

    run(all_of_them())
    assert engine.stats() == (0, 0, 0.0)
    assert not engine._lanes[None]._router.streams


def test_a_cancelled_task_ends_its_sequence(engine: TransformersEngine, run: Run) -> None:
    async def cancel() -> Any:
        task = asyncio.create_task(
            collect(engine, ids("a"), Sampling(max_tokens=250, temperature=0.0))
        )
        await until_running(engine, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return engine.stats()

    assert run(cancel()) == (0, 0, 0.0)


def test_adapters_share_the_weights_of_the_base(
    llama: Path, adapters: dict[str, Path], run: Run, wanted: list[list[int]]
) -> None:
    from peft import PeftModel

    engine = start(run, model_of(llama), adapters)
    try:
        models = [engine._lanes[name].model for name in (None, "polite", "terse")]
        projections = [
            models[0].model.layers[0].self_attn.q_proj,
            *(each.model.layers[0].self_attn.q_proj.base_layer for each in models[1:]),
        ]
        assert len({each.weight.data_ptr() for each in projections}) == 1
        assert len({each.model.embed_tokens.weight.data_ptr() for each in models}) == 1
        prompt = ids(TEXTS[0])

        async def together() -> list[list[int]]:
            sampling = [
                Sampling(max_tokens=24, temperature=0.0, adapter=name)
                for name in (None, "polite", "terse")
            ]
            return [
                found
                for found, _ in await asyncio.gather(
                    *(collect(engine, prompt, each) for each in sampling)
                )
            ]

        base, *adapted = run(together())
        assert base == wanted[0]
        for found, directory in zip(adapted, adapters.values(), strict=True):
            alone = PeftModel.from_pretrained(model_of(llama), directory)
            assert (
                found
                == alone.generate(
                    input_ids=torch.tensor([prompt], device=DEVICE),
                    max_new_tokens=24,
                    do_sample=False,
                )[0][len(prompt) :].tolist()
            )
        assert len({tuple(each) for each in (base, *adapted)}) == 3
    finally:
        run(engine.close())


@small_pages
def test_a_small_cache_makes_sequences_wait_and_then_refuses(
    llama: Path, run: Run, wanted: list[list[int]]
) -> None:
    engine = start(run, model_of(llama), max_sequences=2, cache_memory=300_000)
    try:
        assert engine.context_length == engine.cache_tokens < CONTEXT
        longest = Sampling(max_tokens=engine.context_length - len(ids("a")), temperature=0.0)

        async def crowd() -> list[Any]:
            wanted = [
                *((ids(text), GREEDY) for text in TEXTS),
                (ids("a"), longest),
                (ids("a"), GREEDY),
                (ids("a"), GREEDY),
            ]
            with engine._lanes[None]._manager.pause():
                tasks = [asyncio.create_task(collect(engine, *each)) for each in wanted]
                await asyncio.sleep(0)
                assert engine.stats()[:2] == (0, 8)
                with pytest.raises(Unavailable, match="8 sequences wait for room") as refused:
                    engine.generate(ids("a"), GREEDY)
            assert 1 <= (refused.value.retry_after or 0) <= 60
            return [await task for task in tasks]

        found = run(crowd())
        assert [tokens for tokens, _ in found[:5]] == wanted
        assert len(found[5][0]) == longest.max_tokens
        assert engine.stats() == (0, 0, 0.0)
    finally:
        run(engine.close())


@small_pages
def test_a_full_cache_takes_new_sequences_once_all_have_left(
    llama: Path, run: Run, wanted: list[list[int]]
) -> None:
    engine = start(run, model_of(llama), max_sequences=8, cache_memory=400_000)
    scheduler = engine._lanes[None]._manager.batch_processor.scheduler

    async def leave() -> list[int]:
        tasks = [
            asyncio.create_task(
                collect(engine, ids("a"), Sampling(max_tokens=100, temperature=0.0))
            )
            for _ in range(8)
        ]
        while not scheduler.block_new_requests:  # noqa: ASYNC110  # the engine has no event for a cache that is full
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return (await collect(engine, ids(TEXTS[0]), GREEDY))[0]

    try:
        assert run(leave()) == wanted[0]
        assert engine.stats() == (0, 0, 0.0)
    finally:
        run(engine.close())


def test_a_cache_that_is_too_small_for_anything_is_refused_at_load(llama: Path) -> None:
    with pytest.raises(LoadError, match=r"Set cacheMemory to \d+ or more"):
        TransformersEngine(model_of(llama), {}, HuggingFaceConfig(cache_memory=5000), [0])


def test_an_engine_that_dies_ends_all_its_streams(llama: Path, run: Run) -> None:
    engine = start(run, model_of(llama))

    async def die() -> list[Any]:
        tasks = [
            asyncio.create_task(
                collect(engine, ids(text), Sampling(max_tokens=230, temperature=0.0))
            )
            for text in TEXTS[:3]
        ]
        await until_running(engine, 3)

        def broken(*arguments: Any) -> None:
            raise RuntimeError("the device is gone")

        engine._lanes[None]._manager.batch_processor.update_batch = broken
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    errors = run(die())
    assert all(
        isinstance(error, EngineDied) and "the device is gone" in str(error) for error in errors
    )
    engine._lanes[None]._thread.join(10)
    run(asyncio.sleep(0))
    with pytest.raises(EngineDied):
        engine.generate(ids("a"), GREEDY)


def test_a_sequence_that_begins_after_its_reader_has_left_is_ended(
    engine: TransformersEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of steps may read that it is cancelled before it reads the request."""
    manager = engine._lanes[None]._manager

    async def late() -> int:
        kept: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                manager, "add_request", lambda *arguments, **named: kept.append((arguments, named))
            )
            task = asyncio.create_task(
                collect(engine, ids("a"), Sampling(max_tokens=250, temperature=0.0))
            )
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        step = manager.current_batch
        manager.add_request(*kept[0][0], **kept[0][1])
        while (  # noqa: ASYNC110
            manager.current_batch == step
            or manager.batch_processor.scheduler.has_pending_requests()
        ):  # as above
            await asyncio.sleep(0)
        return int(manager.current_batch - step)

    assert run(late()) < 100
