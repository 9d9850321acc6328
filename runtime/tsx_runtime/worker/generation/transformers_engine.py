"""Text generation by transformers' continuous batching.

The base model and each adapter have a paged cache and a thread of steps.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.errors import Unavailable
from tsx_runtime.shared.memory import free_memory
from tsx_runtime.worker.exceptions import EngineDied, LoadError, describe_error
from tsx_runtime.worker.generation import attention
from tsx_runtime.worker.generation.interface import (
    EngineStats,
    FinishReason,
    Sampling,
    TokenLogprob,
    Tokens,
)
from tsx_runtime.worker.generation.pretrained import adapter_view
from tsx_runtime.worker.generation.sampler import Sampler, SamplingRunner, sampling_arguments

MAX_ON_CPU, MAX_ON_GPU = 64, 256  # sequences at a time
# Tokens of the cache that a sequence on a CPU gets at a time. The kernels of a GPU need another
# number, which the engine chooses.
CPU_PAGE_TOKENS = 16
CPU_STEP_TOKENS = 512  # Longer prompts take several steps, between which other sequences go on.
CPU_CACHE_DIVISOR = 4  # The cache of a CPU takes this part of the free memory.
# So many caches full of prompts may wait, and so many sequences for each one that can run.
MAX_WAITING = 4
ENDED = (RequestStatus.FINISHED, RequestStatus.FAILED)
MAX_RETRY_AFTER_S = 60

# At INFO it logs its choices for each engine.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)


class TransformersEngine:
    """The engines of the base model and its adapters."""

    adapters: Sequence[str]

    def __init__(
        self,
        model: Any,
        adapters: Mapping[str, Path],
        config: HuggingFaceConfig,
        end_tokens: Sequence[int],
    ) -> None:
        """Prepare the engines for `start`.

        Raises:
            LoadError: The model or an adapter cannot run.
        """
        attention.register()
        attention.choose(model)
        models = {None: model} | {
            name: adapter_view(model, name, directory) for name, directory in adapters.items()
        }
        self.adapters = list(adapters)
        self._engines = {
            name: AdapterEngine(
                variant, batching_config(variant, config, len(models), index), end_tokens
            )
            for index, (name, variant) in enumerate(models.items())
        }

    async def start(self) -> None:
        """Run a few steps of each engine, so that the first request is as fast as the tenth.

        Raises:
            LoadError: The model cannot generate text.
        """
        for engine in self._engines.values():
            await engine.start()
        self.cache_tokens = min(engine.cache_tokens for engine in self._engines.values())
        model_length = getattr(
            self._engines[None].model.config.get_text_config(), "max_position_embeddings", None
        )
        self.context_length = min(model_length or self.cache_tokens, self.cache_tokens)

    def refusal(self, sampling: Sampling) -> str | None:
        if sampling.json_schema is not None:
            return (
                "this model's engine cannot bind an answer to a JSON schema: ask for it in the"
                " prompt, or use the engine vllm"
            )
        return None

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Tokens, None]:
        engine = self._engines[sampling.adapter]
        engine.admit(len(prompt))
        return engine.generate(prompt, sampling)

    def stats(self) -> EngineStats:
        running, waiting, cache_use = zip(
            *(engine.stats() for engine in self._engines.values()), strict=True
        )
        return EngineStats(sum(running), sum(waiting), max(cache_use))

    async def close(self) -> None:
        await asyncio.gather(
            *(asyncio.to_thread(engine.close) for engine in self._engines.values())
        )


class TokenStream:
    """A sequence, with the tokens that its reader has not taken from the thread of steps.

    Attributes:
        prompt: The number of tokens of the prompt.
        began: The time of the request, by `time.monotonic`.
        seen: The number of generated tokens.
        ended: Done once the cache of the sequence is free.
        tokens: The queue of tokens.
    """

    def __init__(self, prompt: int, loop: asyncio.AbstractEventLoop) -> None:
        self.prompt = prompt
        self.began = time.monotonic()
        self.seen = 0
        self.ended: asyncio.Future[None] = loop.create_future()
        self.tokens: asyncio.Queue[Tokens | EngineDied] = asyncio.Queue()


class TokenRouter(OutputRouter):  # type: ignore[misc]  # transformers has no types here
    """The path of a step's tokens to their streams, all at once, on the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sampler: Sampler, end_tokens: Sequence[int]
    ) -> None:
        super().__init__()
        self.streams: dict[str, TokenStream] = {}
        self.waiting = self.waiting_tokens = 0  # streams without a token yet, and their prompts
        self.seconds = 1.0  # the recent duration of a sequence
        self.cancel: Callable[[str], None] = lambda name: None  # replaced by the engine's
        self._loop = loop
        self.sampler = sampler
        self._end_tokens = frozenset(end_tokens)

    # These methods run on the thread of steps.

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self.call(self._pass_on, [(output, self._logprobs_of(output)) for output in outputs])

    def _logprobs_of(self, output: Any) -> TokenLogprob | None:
        tokens = output.generated_tokens
        position, last = len(output.prompt_ids) + len(tokens) - 1, tokens[-1] if tokens else 0
        return self.sampler.take_logprobs(output.request_id, position, last, output.status in ENDED)

    def call(self, function: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # A closed loop means that the worker ends.
            self._loop.call_soon_threadsafe(function, *arguments)

    # These methods run on the event loop.

    def open(self, name: str, prompt: int) -> TokenStream:
        stream = self.streams[name] = TokenStream(prompt, self._loop)
        self.waiting += 1
        self.waiting_tokens += prompt
        return stream

    def close(self, names: Sequence[str]) -> None:
        """Close streams, whose cache the engine has freed."""
        for name in names:
            if (stream := self.streams.pop(name, None)) is not None:
                if not stream.seen:
                    self._begin(stream)
                if not stream.ended.done():
                    stream.ended.set_result(None)

    def fail(self, error: EngineDied) -> None:
        for stream in self.streams.values():
            stream.tokens.put_nowait(error)
        self.close(list(self.streams))

    def _begin(self, stream: TokenStream) -> None:
        self.waiting -= 1
        self.waiting_tokens -= stream.prompt

    def _pass_on(self, outputs: list[tuple[Any, TokenLogprob | None]]) -> None:
        for output, logprobs in outputs:
            name = output.request_id
            stream = self.streams.get(name)
            # The reader has left. If the engine has read that before the request itself, the
            # sequence still runs.
            if stream is None:
                self.cancel(name)
                continue
            if output.status is RequestStatus.FAILED:
                self.close([name])
                stream.tokens.put_nowait(
                    EngineDied(f"The engine has ended, and this answer with it: {output.error}")
                )
                continue
            new = output.generated_tokens[stream.seen :]
            if not stream.seen:
                self._begin(stream)
            stream.seen += len(new)
            finished = output.status is RequestStatus.FINISHED
            reason: FinishReason = "stop" if new and new[-1] in self._end_tokens else "length"
            stream.tokens.put_nowait(
                Tokens(new, reason if finished else None, () if logprobs is None else [logprobs])
            )
            if finished:
                self.seconds += (time.monotonic() - stream.began - self.seconds) / 8
                self.close([name])


class AcknowledgingScheduler(FIFOScheduler):  # type: ignore[misc]  # transformers has no types here
    """A scheduler that reports when the cache of cancelled sequences is free."""

    router: TokenRouter | None = None

    def clear_cancelled_requests(self) -> list[Any]:
        """Clear cancelled requests, and close their streams."""
        cancelled = list(self._requests_to_cancel)
        ran = any(name in self.active_requests for name in cancelled)
        states: list[Any] = super().clear_cancelled_requests()
        # A full cache admits no sequence until one finishes. Those that leave free as much.
        if ran or not self.active_requests:
            self.block_new_requests = False
        for state in states:
            # Otherwise the update of a batch in flight (on GPUs) looks for the cache that it had.
            state.status = RequestStatus.FINISHED
        if cancelled and self.router is not None:
            self.router.sampler.forget(cancelled)
            self.router.call(self.router.close, cancelled)
        return states


SCHEDULER_MAPPING["tsx"] = AcknowledgingScheduler
# A batch processor makes its runner by this name; it has no argument for it.
continuous_api.ModelRunner = SamplingRunner


class AdapterEngine:
    """The engine of the base model or of an adapter, with its cache and its thread of steps."""

    def __init__(
        self, model: Any, config: ContinuousBatchingConfig, end_tokens: Sequence[int]
    ) -> None:
        self.model = model
        self.end_tokens = list(end_tokens)
        generation = copy.deepcopy(model.generation_config) or GenerationConfig()
        generation.update(
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=None,
            num_return_sequences=1,
        )
        if generation.eos_token_id is None:
            generation.eos_token_id = -1
        try:
            self._manager = model.init_continuous_batching(generation, config)
        except ValueError as error:
            raise LoadError(
                f"transformers' continuous batching cannot run this model: {error}"
            ) from error
        self._manager.logit_processor = self.sampler = Sampler(
            list(self._manager.logit_processor.logits_processor)
        )
        self._names = map(str, itertools.count())
        self._died: EngineDied | None = None

    async def start(self) -> None:
        """Start the thread of steps, and generate a few tokens.

        Raises:
            LoadError: The model cannot generate text.
        """
        loop = asyncio.get_running_loop()
        self._router = self._manager.output_router = TokenRouter(
            loop, self.sampler, self.end_tokens
        )
        self._router.cancel = self._manager.cancel_request
        self.cache_tokens = 0
        if self.model.device.type != "cpu":
            self._manager.warmup()
        self._thread = threading.Thread(target=self._run, name="tsx-generation", daemon=True)
        self._thread.start()
        try:
            for sampling in (
                Sampling(max_tokens=4, temperature=0.0),
                Sampling(max_tokens=4, temperature=1.0, top_k=8),
            ):
                async for _ in self.generate([0] * 24, sampling):
                    pass
        except EngineDied as error:
            raise LoadError(f"The model cannot generate text: {error}") from error
        processor = self._manager.batch_processor
        self._cache = processor.cache
        self._sequences = processor.scheduler.max_requests_per_batch
        self.cache_tokens = infer_max_single_request_tokens(self._cache)
        processor.scheduler.router = self._router

    def _run(self) -> None:
        """Run the steps to their end.

        The threads of a daemon are daemons, so the thread of steps keeps no ending worker alive.
        """
        with torch.inference_mode():
            self._manager.start()
        self._manager.join(time.perf_counter())
        error = self._manager.background_thread_status.fatal_error
        died = EngineDied(
            f"The engine has ended{'' if error is None else f': {describe_error(error)}'}. Its"
            " worker is started again."
        )
        self._router.call(self._die, died)

    def _die(self, error: EngineDied) -> None:
        self._died = error
        self._router.fail(error)

    def admit(self, prompt: int) -> None:
        """Admit a sequence, which may wait for the cache.

        Raises:
            Unavailable: Too many sequences wait.
        """
        if self._died is not None:
            raise self._died
        router = self._router
        if router.waiting >= MAX_WAITING * self._sequences or (
            router.waiting and router.waiting_tokens + prompt > MAX_WAITING * self.cache_tokens
        ):
            wait = min(
                MAX_RETRY_AFTER_S, 1 + int(router.seconds * router.waiting / self._sequences)
            )
            raise Unavailable(
                f"{router.waiting} sequences wait for room in the model's cache; try again in"
                f" {wait} s. A larger cacheMemory, or more workers, take more.",
                retry_after=wait,
            )

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Tokens, None]:
        """Continue a prompt.

        Raises:
            EngineDied: The engine has ended.
        """
        if self._died is not None:
            raise self._died
        name = next(self._names)
        stream = self._router.open(name, len(prompt))
        self._manager.add_request(
            list(prompt),
            name,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=self.end_tokens,
            **sampling_arguments(sampling, random.getrandbits(31)),
        )
        try:
            while True:
                tokens = await stream.tokens.get()
                if isinstance(tokens, EngineDied):
                    raise tokens
                yield tokens
                if tokens.finished:
                    return
        finally:
            if not stream.ended.done():
                self._manager.cancel_request(name)
                await stream.ended

    def stats(self) -> EngineStats:
        cache = self._cache
        free = cache.compute_free_capacity(relative=False)
        # Blocks that are cached for prefixes count as free.
        free += sum(
            len(allocator.ledger.cached_blocks) * allocator.bytes_per_block
            for allocator in cache.cache_allocators.values()
        )
        return EngineStats(
            len(self._router.streams) - self._router.waiting,
            self._router.waiting,
            1 - free / (cache.num_sectors * cache.bytes_per_sector),
        )

    def close(self) -> None:
        self._manager.stop(block=False, hard_stop=True)
        self._thread.join()


def batching_config(
    model: Any, limits: HuggingFaceConfig, engines: int, index: int
) -> ContinuousBatchingConfig:
    """Return the configuration of one of so many engines, which share the memory.

    Raises:
        LoadError: The cache would be too small.
    """
    on_cpu = model.device.type == "cpu"
    sequences = limits.max_sequences or (MAX_ON_CPU if on_cpu else MAX_ON_GPU)
    config = ContinuousBatchingConfig(
        scheduler_type="tsx", max_requests_per_batch=sequences, allow_block_sharing=True
    )
    if not on_cpu and limits.cache_memory is None:
        config.max_memory_percent = 0.8 / (engines - index)  # a share of the remaining memory
        return config
    text = model.config.get_text_config()
    size = model.dtype.itemsize
    token_bytes = text.num_hidden_layers * FullAttentionCacheAllocator.get_bytes_per_page(
        find_num_key_value_heads(text), find_head_dim(text), model.dtype, 1
    )
    memory = limits.cache_memory
    if on_cpu:
        config.page_size = CPU_PAGE_TOKENS
        config.max_batch_tokens = max(CPU_STEP_TOKENS, sequences)
        # The mask has a column for each token, and the index 8 bytes.
        token_bytes += config.max_batch_tokens * size + 8
    if memory is None:
        context = getattr(text, "max_position_embeddings", 1 << 20)
        memory = min(
            free_memory() // CPU_CACHE_DIVISOR, engines * token_bytes * sequences * context
        )
    config.num_blocks = memory // engines // token_bytes // config.page_size
    if config.num_blocks < 4:
        raise LoadError(
            f"A cache of {memory} bytes (cacheMemory, or a quarter of the free memory) holds"
            f" {config.num_blocks * config.page_size} tokens for each of {engines} adapters, at"
            f" {token_bytes} bytes a token. Set cacheMemory to"
            f" {4 * config.page_size * token_bytes * engines} or more."
        )
    return config
