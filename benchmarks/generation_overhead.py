"""The cost of tsx per token, on top of transformers' continuous batching.

    python benchmarks/generation_overhead.py [--hidden 512 --layers 8] [--sequences 1 8 32]
    [--tokens 64] [--rounds 5]

The bare loop uses the manager of transformers with its own attention, and counts the tokens. The
engine of tsx adds admission, streams and its sampler. The generator adds text, stop strings and
metrics. The three take turns in one process; the results are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.model_runner import ModelRunner

from tests.support.language_models import bpe_tokenizer, llama
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker.engines.transformers_engine import (
    TransformersEngine,
    batching_config,
)
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import Sampling
from tsx_runtime.features.generation.worker.loading import torch_threads
from tsx_runtime.features.generation.worker.metrics import GenerationMetrics
from tsx_runtime.worker.handler_api.metrics import Metrics


class Bare:
    """The manager of transformers with a cache of the same size, used as documented."""

    def __init__(self, model: Any) -> None:
        ours = batching_config(model, HuggingFaceConfig(), 1, 0)
        config = ContinuousBatchingConfig(
            page_size=ours.page_size,
            num_blocks=ours.num_blocks,
            max_batch_tokens=ours.max_batch_tokens,
            max_requests_per_batch=ours.max_requests_per_batch,
        )
        generation = copy.deepcopy(model.generation_config)
        generation.update(do_sample=False, eos_token_id=-1)
        self.manager = model.init_continuous_batching(generation, config)
        original_runner, continuous_api.ModelRunner = continuous_api.ModelRunner, ModelRunner
        try:
            self.manager.batch_processor = self.manager._create_batch_processor()
        finally:
            continuous_api.ModelRunner = original_runner
        with torch.inference_mode():
            self.manager.start()
        self._names = map(str, itertools.count())

    async def run(self, prompt: list[int], tokens: int) -> None:
        name = next(self._names)
        is_done = asyncio.get_running_loop().create_future()
        self.manager.register_result_handler(
            name, lambda output: is_done.set_result(None) if output.is_finished() else None
        )
        self.manager.add_request(prompt, name, max_new_tokens=tokens, streaming=True)
        await is_done


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tokenizer = bpe_tokenizer()
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
    }
    model = llama(len(tokenizer), -1, tokenizer.pad_token_id, initializer_range=0.05, **sizes)
    model.generation_config.eos_token_id = -1
    torch.set_num_threads(torch_threads(model.num_parameters(), torch.get_num_threads()))
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} million"
        f" parameters, {torch.get_num_threads()} threads"
    )
    bare = Bare(copy.deepcopy(model))
    engine = TransformersEngine(model, {}, HuggingFaceConfig(), [])
    await engine.start()
    generator = TextGenerator(
        tokenizer, engine, None, len(tokenizer), GenerationMetrics(Metrics("m"), "1")
    )
    prompt = tokenizer("Beautiful is better than ugly. Explicit is")["input_ids"]
    sampling = Sampling(max_tokens=options.tokens, temperature=0.0)

    async def by_engine() -> None:
        async for _ in engine.generate(prompt, sampling):
            pass

    async def by_generator() -> None:
        async with aclosing(generator.stream(prompt, sampling)) as pieces:
            async for _ in pieces:
                pass

    contenders: dict[str, Callable[[], Awaitable[None]]] = {
        "bare": lambda: bare.run(prompt, options.tokens),
        "engine": by_engine,
        "generator": by_generator,
    }
    for sequences in options.sequences:
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(options.rounds + 1):
            for name, run_sequence in contenders.items():
                start = time.perf_counter()
                await asyncio.gather(*(run_sequence() for _ in range(sequences)))
                if turn:  # The first turn warms up.
                    rates[name].append(sequences * options.tokens / (time.perf_counter() - start))
        line = [f"{sequences:3} sequences: bare {statistics.median(rates['bare']):7.0f} tokens/s"]
        for name in ("engine", "generator"):
            ratio = statistics.median(
                rate / bare_rate for rate, bare_rate in zip(rates[name], rates["bare"], strict=True)
            )
            line.append(f"{name} {100 * (1 / ratio - 1):+5.1f} %")
        print(", ".join(line), flush=True)
    await engine.close()
    bare.manager.stop(block=True, hard_stop=True)


if __name__ == "__main__":
    asyncio.run(main())
