"""Tokens per second of the transformers engine, with and without reuse of prompts.

Both engines run in this process, and their rounds alternate:

    python -m benchmarks.prompt_reuse
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from tests.support.language_models import tiny_llama
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker.engines import transformers_engine
from tsx_runtime.features.generation.worker.interface import Sampling

ROUNDS, CLIENTS, PROMPT, PREFIX, ANSWER = 5, 8, 250, 200, 32
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}


async def start(directory: Path, *, shares: bool) -> transformers_engine.TransformersEngine:
    from transformers import AutoModelForCausalLM

    original_config = transformers_engine.batching_config

    def batching_config(*arguments: object) -> object:
        config = original_config(*arguments)  # type: ignore[arg-type]
        config.allow_block_sharing = shares
        return config

    with mock.patch.object(transformers_engine, "batching_config", batching_config):
        engine = transformers_engine.TransformersEngine(
            AutoModelForCausalLM.from_pretrained(directory),
            {},
            HuggingFaceConfig(cache_memory=64 << 20),
            [0],
        )
    await engine.start()
    return engine


async def measure(
    engine: transformers_engine.TransformersEngine, prompts: list[list[int]]
) -> float:
    """Return the tokens per second of one round."""

    async def client(prompt: list[int]) -> int:
        sampling = Sampling(max_tokens=ANSWER, temperature=0.0)
        return sum([len(step.token_ids) async for step in engine.generate(prompt, sampling)])

    start_time = time.perf_counter()
    counts = await asyncio.gather(*map(client, prompts))
    return sum(counts) / (time.perf_counter() - start_time)


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        llama = tiny_llama(Path(directory), max_position_embeddings=512, **SIZES)
        engines = {shares: await start(llama, shares=shares) for shares in (False, True)}
    generator = random.Random(0)
    for common in (0, PREFIX):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for round_number in range(ROUNDS + 1):  # The first round warms up.
            prompts = [
                [7] * common + generator.choices(range(1, 500), k=PROMPT - common)
                for _ in range(CLIENTS)
            ]
            for shares, engine in engines.items():
                rate = await measure(engine, prompts)
                if round_number:
                    rates[shares].append(rate)
        ratio = statistics.median(
            new / old for old, new in zip(rates[False], rates[True], strict=True)
        )
        print(
            f"common tokens {common}: {statistics.median(rates[False]):.0f} without,"
            f" {statistics.median(rates[True]):.0f} with reuse, ratio {ratio:.2f}"
        )
    for engine in engines.values():
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
