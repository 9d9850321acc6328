"""Generation on a GPU in half precision, with torch's attention kernel and CUDA graphs of steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.features.generation.conftest import Run
from tests.support.language_models import character_model, zen
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker.engines import attention
from tsx_runtime.features.generation.worker.engines.transformers_engine import TransformersEngine
from tsx_runtime.features.generation.worker.interface import Sampling
from tsx_runtime.features.generation.worker.pretrained import PretrainedFiles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TEXT = zen()[:200]
STARTS = (5, 40, 90, 7, 100, 33)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_model(tmp_path_factory.mktemp("models") / "characters", TEXT)


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"])


@pytest.fixture(scope="module")
def engine(model: Path, run: Run) -> Iterator[TransformersEngine]:
    from transformers import AutoModelForCausalLM

    engine = TransformersEngine(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to("cuda"),
        {},
        HuggingFaceConfig(),
        [0],
    )
    run(engine.start())
    yield engine
    run(engine.close())


async def collect(engine: TransformersEngine, prompt: list[int], sampling: Sampling) -> list[Any]:
    return [tokens async for tokens in engine.generate(prompt, sampling)]


def ids(answer: list[Any]) -> list[int]:
    return [id for step in answer for id in step.token_ids]


def test_steps_run_as_cuda_graphs_and_overlap(engine: TransformersEngine) -> None:
    config = engine._engines[None]._manager.continuous_batching_config
    assert engine._engines[None].model.config._attn_implementation == attention.GPU_IMPLEMENTATION
    assert (any(config.cuda_graph_booleans), config.use_async_batching) == (True, True)


def test_text_stays_correct_while_other_sequences_join_and_leave(
    engine: TransformersEngine, run: Run, tokens: list[int]
) -> None:
    async def leave_early(start: int) -> None:
        async with aclosing(
            engine.generate(tokens[:start], Sampling(max_tokens=200, temperature=1.0))
        ) as stream:
            async for _ in stream:
                return

    async def together() -> list[list[int]]:
        tasks = []
        for start in STARTS * 4:
            tasks.append(
                asyncio.create_task(
                    collect(engine, tokens[:start], Sampling(max_tokens=80, temperature=0.0))
                )
            )
            await leave_early(start)
        return [ids(await task) for task in tasks]

    assert run(together()) == [tokens[start : start + 80] for start in STARTS * 4]
    assert engine.stats() == (0, 0, 0.0)


def test_logprobs_belong_to_their_tokens(
    engine: TransformersEngine, run: Run, tokens: list[int]
) -> None:
    sampling = Sampling(max_tokens=30, temperature=0.0, logprobs=True, top_logprobs=2)

    async def together() -> list[list[Any]]:
        return list(
            await asyncio.gather(*(collect(engine, tokens[:start], sampling) for start in STARTS))
        )

    for answer in run(together()):
        logprobs = [token for step in answer for token in step.logprobs]
        assert [token.token_id for token in logprobs] == ids(answer)
        assert all(-3 < token.logprob <= 0 for token in logprobs)
        assert all(token.top[0][0] == token.token_id for token in logprobs)
    assert not engine._engines[None].sampler._logprobs


def test_vllm_continues_the_training_text(model: Path, tokens: list[int]) -> None:
    pytest.importorskip("vllm")
    from tsx_runtime.features.generation.worker.engines.vllm_engine import VllmEngine

    files = PretrainedFiles(
        model,
        {},
        "text-generation",
        HuggingFaceConfig(cache_memory=1 << 30),
        "bfloat16",
        torch.device("cuda"),
        False,
    )

    async def together() -> list[list[int]]:
        engine = await VllmEngine.load(files, [0])
        sampling = Sampling(max_tokens=80, temperature=0.0)
        try:
            answers = [collect(engine, tokens[:start], sampling) for start in STARTS]
            return [ids(answer) for answer in await asyncio.gather(*answers)]
        finally:
            await engine.close()

    assert asyncio.run(together()) == [tokens[start : start + 80] for start in STARTS]


def test_a_seed_reproduces_an_answer_in_any_batch(
    engine: TransformersEngine, run: Run, tokens: list[int]
) -> None:
    drawn = Sampling(max_tokens=60, temperature=0.5, top_p=0.9, top_k=5, seed=3)

    async def beside_others() -> list[int]:
        neighbours = (
            collect(engine, tokens[:start], Sampling(max_tokens=40, temperature=0.0))
            for start in STARTS
        )
        return ids((await asyncio.gather(collect(engine, tokens[:20], drawn), *neighbours))[0])

    assert run(beside_others()) == ids(run(collect(engine, tokens[:20], drawn)))


@pytest.mark.parametrize(
    ("queries", "keys"),
    [([1], [9]), ([7], [7]), ([1, 1, 1], [4, 12, 1]), ([5, 1, 3], [5, 8, 10])],
    ids=["one", "prompt", "next", "mixed"],
)
def test_attention_equals_masked_attention(queries: list[int], keys: list[int]) -> None:
    """Include padding tokens and empty sequences, which CUDA graphs have."""
    from transformers.generation.continuous_batching.utils import build_attention_mask
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    class GroupedHeads(torch.nn.Module):
        is_causal = True
        num_key_value_groups = 2

    torch.manual_seed(0)
    bounds_q, bounds_k = (
        [0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in (queries, keys)
    )
    (count_q, count_k), spare = (bounds_q[-1], bounds_k[-1]), 5
    shapes = ((8, count_q + spare), (4, count_k + spare), (4, count_k + spare))
    query, key, value = (
        torch.randn(1, *shape, 16, device="cuda", dtype=torch.bfloat16) for shape in shapes
    )
    mask = torch.full(
        (1, 1, count_q, count_k),
        torch.finfo(torch.bfloat16).min,
        dtype=torch.bfloat16,
        device="cuda",
    )
    build_attention_mask(mask, bounds_q, bounds_k, 1)
    expected, _ = sdpa_attention_forward(
        GroupedHeads(),
        query[:, :, :count_q],
        key[:, :, :count_k],
        value[:, :, :count_k],
        mask,
        scaling=0.25,
        is_causal=False,
    )
    padded = ([*bounds, bounds[-1], bounds[-1]] for bounds in (bounds_q, bounds_k))
    lengths = (torch.tensor(bounds, dtype=torch.int32, device="cuda") for bounds in padded)
    options: dict[str, Any] = dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), lengths, strict=True))
    options |= {"max_length_q": count_q + spare, "max_length_k": 1024}
    parts, _ = attention.attend_on_gpu(GroupedHeads(), query, key, value, None, 0.25, **options)
    torch.testing.assert_close(parts[:, :count_q], expected, rtol=2e-2, atol=2e-2)
