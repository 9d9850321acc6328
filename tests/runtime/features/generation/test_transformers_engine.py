"""The engine of transformers' continuous batching, whose tokens must equal those of `generate`."""

from __future__ import annotations

import asyncio
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from tests.runtime.features.generation.conftest import Run
from tests.support.language_models import CONTEXT, bpe_tokenizer, lora_adapter, tiny_llama
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.generation.worker.engines import attention, transformers_engine
from tsx_runtime.features.generation.worker.engines.cpu_inputs import CpuInputs
from tsx_runtime.features.generation.worker.engines.sampler import MIN_LONG_PROMPT, SamplingRunner
from tsx_runtime.features.generation.worker.engines.transformers_engine import TransformersEngine
from tsx_runtime.features.generation.worker.interface import Sampling
from tsx_runtime.worker.exceptions import EngineDied, InvalidInput, LoadError

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


def greedy(max_tokens: int = 24, **options: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **options)


GREEDY = greedy()
SEEDED_SAMPLING = Sampling(max_tokens=24, temperature=0.9, top_p=0.95, top_k=40, seed=7)
Request = tuple[str, Sampling]


def model_of(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).to(DEVICE)


def ids(text: str) -> list[int]:
    return list(bpe_tokenizer()(text)["input_ids"])


async def collect(
    engine: TransformersEngine, text: str, sampling: Sampling
) -> tuple[list[int], str | None]:
    """Return the tokens of an answer and its finish reason."""
    answer: list[int] = []
    async for tokens in engine.generate(ids(text), sampling):
        answer += tokens.token_ids
    return answer, tokens.finish_reason


async def collect_together(
    engine: TransformersEngine, requests: Sequence[Request]
) -> list[list[int]]:
    answers = await asyncio.gather(*(collect(engine, *request) for request in requests))
    return [tokens for tokens, _ in answers]


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition; check it in each iteration of the event loop."""
    while not condition():  # noqa: ASYNC110  # an engine has no event for it
        await asyncio.sleep(0)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def started(
    run: Run, llama: Path, adapters: dict[str, Path] | None = None, **limits: Any
) -> Iterator[TransformersEngine]:
    config, end_token = HuggingFaceConfig(**limits), bpe_tokenizer().eos_token_id
    engine = TransformersEngine(model_of(llama), adapters or {}, config, [end_token])
    run(engine.start())
    yield engine
    run(engine.close())


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return model_of(llama)


@pytest.fixture(scope="module")
def engine(llama: Path, run: Run) -> Iterator[TransformersEngine]:
    with started(run, llama) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """Generate the expected greedy answer to each text with transformers only."""
    return [generate(model, text, GREEDY) for text in TEXTS]


def test_the_tokens_equal_those_of_generate(
    engine: TransformersEngine, run: Run, expected: list[list[int]]
) -> None:
    assert [run(collect(engine, text, GREEDY))[0] for text in TEXTS] == expected


def test_sequences_that_join_and_leave_do_not_change_others(
    engine: TransformersEngine, run: Run, expected: list[list[int]]
) -> None:
    async def leave_early(text: str) -> None:
        async with aclosing(engine.generate(ids(text), SEEDED_SAMPLING)) as stream:
            async for _ in stream:
                return

    async def together() -> list[list[int]]:
        tasks: list[Any] = []
        for text in TEXTS:
            tasks.append(asyncio.create_task(collect(engine, text, GREEDY)))
            # The next sequence begins while the previous ones run.
            await leave_early(f"{text} or not")
        return [(await task)[0] for task in tasks]

    assert run(together()) == expected


def test_a_seed_reproduces_an_answer_in_any_batch(engine: TransformersEngine, run: Run) -> None:
    neighbours = [
        (text, sampling)
        for text in TEXTS
        for sampling in (GREEDY, Sampling(max_tokens=9, temperature=1.3))
    ]
    expected_tokens, _ = run(collect(engine, TEXTS[0], SEEDED_SAMPLING))
    assert (
        run(collect_together(engine, [(TEXTS[0], SEEDED_SAMPLING), *neighbours]))[0]
        == expected_tokens
    )
    another_seed = Sampling(max_tokens=24, temperature=0.9, seed=8)
    assert run(collect(engine, TEXTS[0], another_seed))[0] != expected_tokens


PENALIZED = (
    greedy(repetition_penalty=1.7),
    greedy(frequency_penalty=1.5, presence_penalty=-0.5),
    greedy(logit_bias={7: 3.0, 90: -100.0, 12: 2.5}),
    greedy(
        repetition_penalty=0.8,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        logit_bias={5: 4.0, 33: 6.0},
    ),
)


class OpenAIPenalties(LogitsProcessor):  # type: ignore[misc]  # transformers has no types here
    """A processor for OpenAI's penalties (see its API reference), which transformers lacks."""

    def __init__(self, prompt: int, sampling: Sampling) -> None:
        self.prompt, self.sampling = prompt, sampling

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = input_ids[0, self.prompt :].bincount(minlength=scores.shape[-1])
        return (
            scores
            - counts * self.sampling.frequency_penalty
            - (counts > 0) * self.sampling.presence_penalty
        )


def generate(model: Any, text: str, sampling: Sampling) -> list[int]:
    """Continue a text with transformers' `generate` and, where possible, its processors."""
    prompt = ids(text)
    bias = sampling.logit_bias
    answer = model.generate(
        torch.tensor([prompt], device=DEVICE),
        max_new_tokens=sampling.max_tokens,
        do_sample=False,
        sequence_bias=None if bias is None else [[[token], value] for token, value in bias.items()],
        repetition_penalty=sampling.repetition_penalty,
        logits_processor=[OpenAIPenalties(len(prompt), sampling)],
    )
    return list(answer[0][len(prompt) :].tolist())


@pytest.mark.nightly
def test_penalties_and_biases_equal_those_of_generate_in_any_batch(
    engine: TransformersEngine, run: Run, model: Any, expected: list[list[int]]
) -> None:
    requests = [*zip(TEXTS, PENALIZED, strict=False), (TEXTS[4], PENALIZED[0])]
    penalized = [generate(model, *request) for request in requests]
    assert sum(map(operator.ne, expected, penalized)) >= 3
    assert [run(collect(engine, *request))[0] for request in requests] == penalized
    neighbours = [(text, sampling) for text in TEXTS for sampling in (GREEDY, SEEDED_SAMPLING)]
    answers = run(collect_together(engine, [*requests, *neighbours]))
    assert answers[: len(requests)] == penalized
    assert answers[len(requests) :: 2] == expected


@pytest.mark.nightly
@small_pages
def test_a_sequence_that_loses_its_cache_keeps_its_penalties(
    llama: Path, run: Run, model: Any
) -> None:
    """Use sequences that do not fit into the cache together, so that some lose their cache."""
    with started(run, llama, max_sequences=3, cache_memory=61_000) as engine:
        requests = [
            (text, replace(PENALIZED[1], max_tokens=engine.context_length - len(ids(text))))
            for text in TEXTS[:3]
        ]
        scheduler = engine._engines[None]._manager.batch_processor.scheduler

        async def together() -> tuple[list[list[int]], int]:
            task = asyncio.create_task(collect_together(engine, requests))
            lost: set[str] = set()
            while not task.done():
                states = [*scheduler.waiting_requests.values()]
                lost |= {state.request_id for state in states if state._true_initial_tokens}
                await asyncio.sleep(0)
            return task.result(), len(lost)

        answers, lost = run(together())
        assert lost
        assert answers == [generate(model, *request) for request in requests]


def test_logprobs_equal_the_models(engine: TransformersEngine, run: Run, model: Any) -> None:
    async def read() -> list[Any]:
        stream = engine.generate(
            ids(TEXTS[0]),
            Sampling(max_tokens=3, temperature=1.5, seed=3, logprobs=True, top_logprobs=2),
        )
        return [tokens async for tokens in stream]

    prompt = ids(TEXTS[0])
    for tokens in run(read()):
        (token,) = tokens.logprobs
        logprobs = model(torch.tensor([prompt], device=DEVICE)).logits[0, -1].log_softmax(-1)
        top = logprobs.topk(2)
        assert token.token_id == tokens.token_ids[0]
        assert token.logprob == pytest.approx(logprobs[token.token_id].item(), abs=1e-4)
        assert [id for id, _ in token.top] == top.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        prompt.append(token.token_id)


def test_an_end_token_ends_the_sequence(
    engine: TransformersEngine, run: Run, expected: list[list[int]]
) -> None:
    base_engine = engine._engines[None]
    end_token = expected[0][5]
    base_engine.end_tokens, base_engine._router._end_tokens, old_value = (
        [end_token],
        frozenset([end_token]),
        (base_engine.end_tokens, base_engine._router._end_tokens),
    )
    try:
        answer = run(collect(engine, TEXTS[0], GREEDY))
    finally:
        base_engine.end_tokens, base_engine._router._end_tokens = old_value
    assert answer == (expected[0][: expected[0].index(end_token) + 1], "stop")


def test_closing_a_stream_frees_the_cache_within_a_step(
    engine: TransformersEngine, run: Run
) -> None:
    async def leave() -> tuple[Any, Any, int, int]:
        processor = engine._engines[None]._manager
        stream = engine.generate(ids(TEXTS[3]), greedy(200))
        for _ in range(3):
            await anext(stream)
        while_open, step = engine.stats(), processor.current_batch
        await stream.aclose()
        return while_open, engine.stats(), step, processor.current_batch

    start_stats, end_stats, step, last = run(leave())
    assert (start_stats.running, start_stats.waiting) == (1, 0)
    assert start_stats.cache_use > 0
    assert end_stats == (0, 0, 0.0)
    # One step was running, and the next had begun.
    assert last - step <= 2


def test_a_hundred_clients_that_leave_do_not_leak_cache(
    engine: TransformersEngine, run: Run
) -> None:
    async def client(number: int) -> None:
        sampling = Sampling(max_tokens=200, temperature=1.0)
        async with aclosing(engine.generate(ids(TEXTS[number % 5]), sampling)) as stream:
            for _ in range(3):
                await anext(stream, None)

    async def all_clients() -> None:
        await asyncio.gather(*map(client, range(100)))

    run(all_clients())
    assert engine.stats() == (0, 0, 0.0)
    assert not engine._engines[None]._router.streams


def test_a_cancelled_task_ends_its_sequence(engine: TransformersEngine, run: Run) -> None:
    async def cancel_one() -> Any:
        task = asyncio.create_task(collect(engine, "a", greedy(250)))
        await wait_until(lambda: engine.stats().running == 1)
        await cancel(task)
        return engine.stats()

    assert run(cancel_one()) == (0, 0, 0.0)


@pytest.mark.nightly
def test_adapters_share_the_weights_of_the_base(
    llama: Path, adapters: dict[str, Path], run: Run, expected: list[list[int]]
) -> None:
    from peft import PeftModel

    names = (None, "polite", "terse")
    with started(run, llama, adapters) as engine:
        base_engine, *adapted_models = (engine._engines[name].model for name in names)
        projections = [
            base_engine.model.layers[0].self_attn.q_proj,
            *(model.model.layers[0].self_attn.q_proj.base_layer for model in adapted_models),
        ]
        weights = {projection.weight.data_ptr() for projection in projections}
        embeddings = {
            model.model.embed_tokens.weight.data_ptr() for model in (base_engine, *adapted_models)
        }
        assert (len(weights), len(embeddings)) == (1, 1)
        requests = [(TEXTS[0], greedy(adapter=name)) for name in names]
        base_answer, *answers = run(collect_together(engine, requests))
    assert base_answer == expected[0]
    prompt = ids(TEXTS[0])
    for answer, directory in zip(answers, adapters.values(), strict=True):
        expected_tokens = PeftModel.from_pretrained(model_of(llama), directory).generate(
            input_ids=torch.tensor([prompt], device=DEVICE), max_new_tokens=24, do_sample=False
        )
        assert answer == expected_tokens[0][len(prompt) :].tolist()
    assert base_answer != answers[0] != answers[1] != base_answer


@pytest.mark.nightly
@small_pages
def test_with_a_small_cache_sequences_wait_and_further_ones_are_refused(
    llama: Path, run: Run, expected: list[list[int]]
) -> None:
    with started(run, llama, max_sequences=2, cache_memory=61_000) as engine:
        assert engine.context_length == engine.cache_tokens < CONTEXT
        longest_sampling = greedy(engine.context_length - len(ids("a")))
        requests = [
            *((text, GREEDY) for text in TEXTS),
            ("a", longest_sampling),
            ("a", GREEDY),
            ("a", GREEDY),
        ]

        async def crowd() -> list[list[int]]:
            with engine._engines[None]._manager.pause():
                answers = asyncio.create_task(collect_together(engine, requests))
                await wait_until(lambda: engine.stats()[:2] == (0, 8))
                with pytest.raises(Unavailable, match="8 sequences wait for room") as exc_info:
                    engine.generate(ids("a"), GREEDY)
            assert 1 <= (exc_info.value.retry_after or 0) <= 60
            return await answers

        answers = run(crowd())
        assert answers[:5] == expected
        assert len(answers[5]) == longest_sampling.max_tokens
        assert engine.stats() == (0, 0, 0.0)


@pytest.mark.nightly
@small_pages
def test_a_full_cache_accepts_new_sequences_after_all_have_left(
    llama: Path, run: Run, expected: list[list[int]]
) -> None:
    with started(run, llama, max_sequences=8, cache_memory=81_000) as engine:
        scheduler = engine._engines[None]._manager.batch_processor.scheduler

        async def leave() -> list[int]:
            tasks = [asyncio.create_task(collect(engine, "a", greedy(100))) for _ in range(8)]
            await wait_until(lambda: scheduler.block_new_requests)
            await cancel(*tasks)
            return (await collect(engine, TEXTS[0], GREEDY))[0]

        assert run(leave()) == expected[0]
        assert engine.stats() == (0, 0, 0.0)


def test_a_cache_too_small_for_one_sequence_is_refused_at_load(llama: Path) -> None:
    with pytest.raises(LoadError, match=r"Set cacheMemory to \d+ or more"):
        TransformersEngine(model_of(llama), {}, HuggingFaceConfig(cache_memory=5000), [0])


def test_an_engine_that_dies_ends_all_its_streams(llama: Path, run: Run) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("the device is gone")

    with started(run, llama) as engine:
        base_engine = engine._engines[None]

        async def die() -> list[Any]:
            tasks = [asyncio.create_task(collect(engine, text, greedy(230))) for text in TEXTS[:3]]
            await wait_until(lambda: engine.stats().running == 3)
            base_engine._manager.batch_processor.update_batch = broken
            return list(await asyncio.gather(*tasks, return_exceptions=True))

        for error in run(die()):
            assert isinstance(error, EngineDied)
            assert "the device is gone" in str(error)
        base_engine._thread.join(10)
        run(asyncio.sleep(0))
        with pytest.raises(EngineDied):
            engine.generate(ids("a"), GREEDY)


def test_a_sequence_is_ended_if_its_reader_left_before_it_began(
    engine: TransformersEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the engine's thread see the cancellation before the request."""
    manager = engine._engines[None]._manager

    async def late() -> int:
        calls: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                manager, "add_request", lambda *values, **options: calls.append((values, options))
            )
            task = asyncio.create_task(collect(engine, "a", greedy(250)))
            await asyncio.sleep(0)
            await cancel(task)
        step = manager.current_batch
        ((values, options),) = calls
        manager.add_request(*values, **options)
        await wait_until(
            lambda: (
                manager.current_batch != step
                and not manager.batch_processor.scheduler.has_pending_requests()
            )
        )
        return int(manager.current_batch - step)

    assert run(late()) < 100


def test_an_adapter_comes_and_goes_while_sequences_run(
    engine: TransformersEngine,
    llama: Path,
    adapters: dict[str, Path],
    run: Run,
    expected: list[list[int]],
) -> None:
    from peft import PeftModel

    async def change() -> tuple[list[list[int]], Any]:
        base_task = asyncio.create_task(collect(engine, TEXTS[0], GREEDY))
        await engine.add_adapter("polite", adapters["polite"])
        assert engine.adapters == ["polite"]
        first = await collect(engine, TEXTS[0], greedy(adapter="polite"))
        stream = engine.generate(ids(TEXTS[0]), greedy(adapter="polite"))
        late_stream = engine.generate(ids(TEXTS[0]), greedy(adapter="polite"))
        begun = list((await anext(stream)).token_ids)
        model = weakref.ref(engine._engines["polite"].model)
        await engine.add_adapter("polite", adapters["terse"])
        replaced = await collect(engine, TEXTS[0], greedy(adapter="polite"))
        engine.remove_adapter("polite")
        with pytest.raises(InvalidInput, match="The adapter polite was removed"):
            await anext(late_stream)
        begun += [token async for tokens in stream for token in tokens.token_ids]
        assert engine.adapters == []
        await asyncio.gather(*engine._removals)
        return [(await base_task)[0], first[0], begun, replaced[0]], model

    (base_answer, *answers), model = run(change())
    assert base_answer == expected[0]
    prompt = ids(TEXTS[0])
    for answer, name in zip(answers, ("polite", "polite", "terse"), strict=True):
        adapted_model = PeftModel.from_pretrained(model_of(llama), adapters[name])
        expected_tokens = adapted_model.generate(
            input_ids=torch.tensor([prompt], device=DEVICE), max_new_tokens=24, do_sample=False
        )
        assert answer == expected_tokens[0][len(prompt) :].tolist()
    assert model() is None


@small_pages
def test_an_adapter_without_room_or_of_another_model_changes_nothing(
    engine: TransformersEngine,
    adapters: dict[str, Path],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    larger = tiny_llama(tmp_path / "larger", num_hidden_layers=3)
    wider = tiny_llama(tmp_path / "wider", hidden_size=96)
    for base, reason in ((larger, "is of another model"), (wider, "does not fit the model")):
        adapter = lora_adapter(base, tmp_path / f"{base.name}-adapter", 1)
        with pytest.raises(LoadError, match=reason):
            run(engine.add_adapter("bad", adapter))
    with monkeypatch.context() as patch:
        patch.setattr(transformers_engine, "free_memory", lambda: 200_000)
        with pytest.raises(LoadError, match="too little memory is free"):
            run(engine.add_adapter("bad", adapters["polite"]))
    assert engine.adapters == []
    assert run(collect(engine, TEXTS[0], GREEDY))[0] == expected[0]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with a sliding window of six tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        **{"vocab_size": len(bpe_tokenizer()), "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": CONTEXT, "initializer_range": 0.2, "sliding_window": 6},
    )
    directory = tmp_path_factory.mktemp("mistral")
    MistralForCausalLM(config).save_pretrained(directory)
    return directory


def test_sliding_windows_give_the_text_of_generate(mistral: Path, run: Run) -> None:
    model = model_of(mistral)
    expected = [
        model.generate(
            **{"input_ids": torch.tensor([ids(text)], device=DEVICE), "max_new_tokens": 12},
            **{"do_sample": False, "eos_token_id": -1},
        )[0, len(ids(text)) :].tolist()
        for text in TEXTS
    ]
    with started(run, mistral) as engine:
        assert run(collect_together(engine, [(text, greedy(12)) for text in TEXTS])) == expected


@small_pages
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_inputs_of_steps_equal_those_of_transformers(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    steps: list[tuple[Any, Any]] = []
    prepare = CpuInputs.prepare_batch_tensors

    def values(inputs: Any, states: list[Any]) -> Any:
        arguments = {**inputs.get_model_kwargs(), "cache": None}
        progress = [(state.position_offset, state.tokens_to_process) for state in states]
        flat, _ = torch.utils._pytree.tree_flatten(arguments)
        return [v.tolist() if torch.is_tensor(v) else v for v in flat], progress

    def prepare_twice(inputs: Any, requests_in_batch: list[Any], **options: Any) -> None:
        states = [request.state for request in requests_in_batch]
        progress = [(state.position_offset, state.tokens_to_process) for state in states]
        prepare(inputs, requests_in_batch, **options)
        written = values(inputs, states)
        for state, (position, tokens) in zip(states, progress, strict=True):
            state.position_offset, state.tokens_to_process = position, tokens
        ContinuousBatchingIOs.prepare_batch_tensors(inputs, requests_in_batch, **options)
        steps.append((written, values(inputs, states)))

    monkeypatch.setattr(CpuInputs, "prepare_batch_tensors", prepare_twice)
    monkeypatch.setattr(transformers_engine, "CPU_STEP_TOKENS", 32)
    with started(run, request.getfixturevalue(name), max_sequences=8) as engine:
        # The long prompts are split, and the second time their beginnings are in the cache.
        texts = (*TEXTS, TEXTS[3] * 2)
        for _ in range(2):
            run(collect_together(engine, [(text, greedy(12)) for text in texts]))
    assert len(steps) > 2 * 12
    for written, expected in steps:
        assert written == expected


@small_pages
def test_steps_with_long_prompts_have_threads_of_their_own(
    llama: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[bool, int]] = []
    forward = SamplingRunner._forward_process_and_sample

    def record(runner: Any, model: Any, batch_data: dict[str, Any], *tokens: Any) -> None:
        is_long = batch_data["input_ids"].shape[1] >= MIN_LONG_PROMPT
        steps.append((is_long, torch.get_num_threads()))
        forward(runner, model, batch_data, *tokens)

    monkeypatch.setattr(SamplingRunner, "_forward_process_and_sample", record)
    threads = torch.get_num_threads()
    engine = TransformersEngine(model_of(llama), {}, HuggingFaceConfig(), [], None, threads + 1)
    run(engine.start())
    run(collect(engine, TEXTS[0] * 20, greedy(2)))
    run(engine.close())
    assert set(steps) == {(True, threads + 1), (False, threads)}


def test_capped_scores_are_computed_by_transformers(llama: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    capped = Gemma2ForCausalLM(Gemma2Config(**sizes, num_hidden_layers=2))
    capped.config._attn_implementation = "sdpa"
    usual = AutoModelForCausalLM.from_pretrained(llama)
    for model, name in ((capped, "sdpa"), (usual, attention.CPU_IMPLEMENTATION)):
        attention.choose_attention(model)
        assert model.config._attn_implementation == name
