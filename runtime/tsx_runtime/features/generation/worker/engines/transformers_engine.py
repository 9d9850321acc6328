"""An engine for text generation that uses transformers' continuous batching.

The base model and each adapter have their own paged cache, and their own thread that runs steps.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

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
from transformers.utils.generic import is_flash_attention_requested

from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.generation.worker.engines import attention
from tsx_runtime.features.generation.worker.engines.cpu_inputs import CpuInputs
from tsx_runtime.features.generation.worker.engines.grammars import (
    GrammarCompiler,
    missing_grammar_support,
)
from tsx_runtime.features.generation.worker.engines.prompt_cache import PromptCache, sequence_name
from tsx_runtime.features.generation.worker.engines.sampler import (
    GrammarSequence,
    Sampler,
    SamplingRunner,
    sampling_arguments,
)
from tsx_runtime.features.generation.worker.interface import (
    EngineStats,
    FinishReason,
    Media,
    Sampling,
    TokenLogprob,
    Tokens,
)
from tsx_runtime.features.generation.worker.media import SequenceEmbeddings, embed_prompt
from tsx_runtime.features.generation.worker.pretrained import load_adapter
from tsx_runtime.shared.memory import free_memory
from tsx_runtime.worker.exceptions import EngineDied, InvalidInput, LoadError, describe_error

MAX_CPU_SEQUENCES, MAX_GPU_SEQUENCES = 64, 256  # sequences that run at the same time
# The page size of the cache on a CPU. On a GPU, transformers chooses the size that its kernels
# need.
CPU_PAGE_TOKENS = 16
# Longer prompts are split over several steps, so that other sequences can continue.
CPU_STEP_TOKENS = 512
CPU_CACHE_DIVISOR = 4  # On a CPU, the cache takes a quarter of the free memory.
# The limit of waiting sequences, as a multiple of those that can run, and the limit of their
# prompts, as a multiple of the cache.
MAX_WAITING_FACTOR = 4
ENDED_STATUSES = (RequestStatus.FINISHED, RequestStatus.FAILED)
MAX_RETRY_AFTER_S = 60

# At INFO, this logger reports details of the configuration of each engine.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)


class TransformersEngine:
    """An engine for a base model and its adapters, each of which has an engine of its own."""

    def __init__(
        self,
        model: Any,
        adapters: Mapping[str, Path],
        config: HuggingFaceConfig,
        end_tokens: Sequence[int],
        tokenizer: Any = None,
        prompt_threads: int | None = None,
    ) -> None:
        """Prepare the engines for `start`.

        Args:
            model: The base model.
            adapters: The directories of the adapters.
            config: The limits of the engines.
            end_tokens: The tokens that end a text.
            tokenizer: The tokenizer. Without it there are no grammars.
            prompt_threads: The number of torch's threads for steps with long prompts; None means
                the same as for other steps.

        Raises:
            LoadError: The model or an adapter cannot run.
        """
        attention.register_attention()
        attention.choose_attention(model)
        models = {None: model} | {
            name: load_adapter(model, name, directory) for name, directory in adapters.items()
        }
        self._grammar_refusal = missing_grammar_support(tokenizer)
        if self._grammar_refusal is None:
            vocabulary = model.config.get_text_config().vocab_size
            self._grammars = GrammarCompiler(tokenizer, vocabulary, end_tokens)
        self._engines = {
            name: AdapterEngine(
                variant,
                batching_config(variant, config, len(models), index),
                end_tokens,
                prompt_threads,
            )
            for index, (name, variant) in enumerate(models.items())
        }
        self._end_tokens, self._prompt_threads = end_tokens, prompt_threads
        # An adapter that is added later gets as much memory as one that was loaded with the model.
        memory = config.cache_memory and config.cache_memory // len(models)
        self._added_config = replace(config, cache_memory=memory)
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def adapters(self) -> Sequence[str]:
        return [name for name in self._engines if name is not None]

    async def start(self) -> None:
        """Run a few steps of each engine to warm it up for the first request.

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

    async def add_adapter(self, name: str, directory: Path) -> None:
        """Add an adapter with a cache of its own, from memory that is free now.

        Raises:
            LoadError: The adapter does not fit the model, or too little memory is free.
        """
        engine = await asyncio.to_thread(self._load_adapter, name, directory)
        try:
            await engine.start()
            if engine.cache_tokens < self.context_length:
                raise LoadError(
                    f"The adapter {name} gets a cache of {engine.cache_tokens} tokens, fewer than"
                    f" the model's context of {self.context_length}: too little memory is free."
                    " Remove another adapter, or set a smaller cacheMemory."
                )
        except BaseException:
            await asyncio.to_thread(engine.close)
            raise
        self.remove_adapter(name)
        self._engines[name] = engine

    def _load_adapter(self, name: str, directory: Path) -> AdapterEngine:
        model = load_adapter(self._engines[None].model, name, directory)
        config = self._added_config
        if model.device.type == "cpu" and (config.cache_memory or 0) > free_memory():
            raise LoadError(
                f"The adapter {name} needs {config.cache_memory} bytes for its cache, its share of"
                f" cacheMemory, and {free_memory()} are free. Remove another adapter, or set a"
                " smaller cacheMemory."
            )
        batching = batching_config(model, config, 1, 0)
        return AdapterEngine(model, batching, self._end_tokens, self._prompt_threads)

    def remove_adapter(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is not None:
            removal = asyncio.create_task(engine.retire(name))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    def refusal(self, sampling: Sampling) -> str | None:
        return None if sampling.grammar is None else self._grammar_refusal

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, media: Media | None = None
    ) -> AsyncGenerator[Tokens, None]:
        engine = self._engines[sampling.adapter]
        engine.admit(len(prompt))
        return self._generate(engine, prompt, sampling, media)

    async def _generate(
        self,
        engine: AdapterEngine,
        prompt: Sequence[int],
        sampling: Sampling,
        media: Media | None,
    ) -> AsyncGenerator[Tokens, None]:
        """Compile the grammar, and continue the prompt.

        Raises:
            EngineDied: The engine has ended.
            InvalidInput: The grammar cannot be compiled, or became too complex for its limits.
        """
        grammar = None
        if sampling.grammar is not None:
            grammar = GrammarSequence(await self._grammars.compile(sampling.grammar))
        async with aclosing(engine.generate(prompt, sampling, grammar, media)) as stream:
            async for tokens in stream:
                if tokens.finish_reason and grammar is not None and grammar.error is not None:
                    raise InvalidInput(f"The text had to end within its grammar: {grammar.error}")
                yield tokens

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
    """The stream of a sequence's tokens from the thread of steps to the reader.

    Attributes:
        prompt: The number of tokens of the prompt.
        started_at: The time of the request, as `time.monotonic()`.
        token_count: The number of generated tokens.
        cache_freed: Done once the cache of the sequence is free.
        tokens: The queue of tokens that the reader has not yet taken.
    """

    def __init__(self, prompt: int, loop: asyncio.AbstractEventLoop) -> None:
        self.prompt = prompt
        self.started_at = time.monotonic()
        self.token_count = 0
        self.cache_freed: asyncio.Future[None] = loop.create_future()
        self.tokens: asyncio.Queue[Tokens | EngineDied] = asyncio.Queue()


class TokenRouter(OutputRouter):  # type: ignore[misc]  # transformers has no types here
    """A router that passes all tokens of a step to their streams, by one call on the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sampler: Sampler, end_tokens: Sequence[int]
    ) -> None:
        super().__init__()
        self.streams: dict[str, TokenStream] = {}
        # Streams without a token yet, and the tokens of their prompts.
        self.waiting = self.waiting_tokens = 0
        self.sequence_s = 1.0  # the moving average of the duration of a sequence, in seconds
        self.cancel: Callable[[str], None] = lambda name: None  # The engine replaces this function.
        self._loop = loop
        self.sampler = sampler
        self.cached_tokens: dict[str, int] = {}  # The engine replaces this dict by its cache's.
        self._end_tokens = frozenset(end_tokens)

    # These methods run on the thread of steps.

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        items = [
            (
                output,
                self._take_logprobs(output),
                self.cached_tokens.pop(output.request_id, 0),
            )
            for output in outputs
        ]
        self.call(self._deliver_to_streams, items)

    def _take_logprobs(self, output: Any) -> TokenLogprob | None:
        tokens = output.generated_tokens
        position, last = len(output.prompt_ids) + len(tokens) - 1, tokens[-1] if tokens else 0
        return self.sampler.take_logprobs(
            output.request_id, position, last, output.status in ENDED_STATUSES
        )

    def call(self, function: Any, *arguments: Any) -> None:
        with suppress(RuntimeError):  # The loop is closed if the worker is ending.
            self._loop.call_soon_threadsafe(function, *arguments)

    # These methods run on the event loop.

    def open(self, name: str, prompt: int) -> TokenStream:
        stream = self.streams[name] = TokenStream(prompt, self._loop)
        self.waiting += 1
        self.waiting_tokens += prompt
        return stream

    def close(self, names: Sequence[str]) -> None:
        """Close the streams of sequences whose cache the engine has freed."""
        for name in names:
            if (stream := self.streams.pop(name, None)) is not None:
                if not stream.token_count:
                    self._stop_waiting(stream)
                if not stream.cache_freed.done():
                    stream.cache_freed.set_result(None)

    def fail(self, error: EngineDied) -> None:
        for stream in self.streams.values():
            stream.tokens.put_nowait(error)
        self.close(list(self.streams))

    def _stop_waiting(self, stream: TokenStream) -> None:
        self.waiting -= 1
        self.waiting_tokens -= stream.prompt

    def _deliver_to_streams(self, outputs: list[tuple[Any, TokenLogprob | None, int]]) -> None:
        for output, logprobs, cached_tokens in outputs:
            name = output.request_id
            stream = self.streams.get(name)
            # The reader has closed its stream, but the sequence still runs. This happens if the
            # engine reads the cancellation before the request itself.
            if stream is None:
                self.cancel(name)
                continue
            if output.status is RequestStatus.FAILED:
                self.close([name])
                stream.tokens.put_nowait(
                    EngineDied(f"The engine has ended, and this answer with it: {output.error}")
                )
                continue
            new_tokens = output.generated_tokens[stream.token_count :]
            if stream.token_count:
                cached_tokens = 0  # A sequence that has lost its cache may find its own blocks.
            else:
                self._stop_waiting(stream)
            stream.token_count += len(new_tokens)
            is_finished = output.status is RequestStatus.FINISHED
            reason: FinishReason = (
                "stop" if new_tokens and new_tokens[-1] in self._end_tokens else "length"
            )
            stream.tokens.put_nowait(
                Tokens(
                    new_tokens,
                    reason if is_finished else None,
                    () if logprobs is None else [logprobs],
                    cached_tokens,
                )
            )
            if is_finished:
                self.sequence_s += (time.monotonic() - stream.started_at - self.sequence_s) / 8
                self.close([name])


class AcknowledgingScheduler(FIFOScheduler):  # type: ignore[misc]  # transformers has no types here
    """A scheduler that closes the streams of cancelled sequences once their cache is free."""

    router: TokenRouter | None = None

    def clear_cancelled_requests(self) -> list[Any]:
        """Clear cancelled requests, and close their streams."""
        cancelled_names = list(self._requests_to_cancel)
        was_running = any(name in self.active_requests for name in cancelled_names)
        states: list[Any] = super().clear_cancelled_requests()
        # With a full cache, new sequences are blocked until one finishes. Cancelled sequences free
        # memory, too, so they end the blockade.
        if was_running or not self.active_requests:
            self.block_new_requests = False
        for state in states:
            # Otherwise the update of a batch that is still running on a GPU would look for the
            # freed cache.
            state.status = RequestStatus.FINISHED
        if cancelled_names and self.router is not None:
            self.router.sampler.forget(cancelled_names)
            for name in cancelled_names:
                self.router.cached_tokens.pop(name, None)
            self.router.call(self.router.close, cancelled_names)
        return states


SCHEDULER_MAPPING["tsx"] = AcknowledgingScheduler
# A manager creates its parts by these names, and has no argument for others.
continuous_api.ModelRunner = SamplingRunner
continuous_api.PagedAttentionCache = PromptCache
continuous_api.ContinuousBatchingIOs = CpuInputs


class AdapterEngine:
    """The engine of the base model or of an adapter, with its cache and its thread of steps."""

    def __init__(
        self,
        model: Any,
        config: ContinuousBatchingConfig,
        end_tokens: Sequence[int],
        prompt_threads: int | None,
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
            list(self._manager.logit_processor.logits_processor), prompt_threads
        )
        self._numbers = itertools.count()
        # Sequences of one request share the embeddings of their prompt.
        self._embeddings = WeakValueDictionary[Any, torch.Tensor]()
        self._embedding_lock = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="tsx-generation", daemon=True)
        self._refusal: EngineDied | InvalidInput | None = None  # the error of new sequences

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
            await asyncio.to_thread(self._manager.warmup)  # Other engines may have sequences.
        self._thread.start()
        try:
            for sampling in (
                Sampling(max_tokens=4, temperature=0.0),
                Sampling(max_tokens=4, temperature=1.0, top_k=8),
            ):
                async for _ in self.generate([0] * 24, sampling, None):
                    pass
        except EngineDied as error:
            raise LoadError(f"The model cannot generate text: {error}") from error
        processor = self._manager.batch_processor
        self._cache = processor.cache
        self._sequences = processor.scheduler.max_requests_per_batch
        self.cache_tokens = infer_max_single_request_tokens(self._cache)
        processor.scheduler.router = self._router
        self._router.cached_tokens = self._cache.cached_tokens
        self._router.cached_tokens.clear()

    def _run(self) -> None:
        """Run steps until the engine ends.

        This thread is a daemon, and so is the thread that it starts. Therefore neither keeps an
        ending worker alive.
        """
        with torch.inference_mode():
            self._manager.start()
        self._manager.join(time.perf_counter())
        error = self._manager.background_thread_status.fatal_error
        engine_error = EngineDied(
            f"The engine has ended{'' if error is None else f': {describe_error(error)}'}. Its"
            " worker is started again."
        )
        self._router.call(self._fail_streams, engine_error)

    def _fail_streams(self, error: EngineDied) -> None:
        self._refusal = self._refusal or error
        self._router.fail(error)

    async def retire(self, name: str) -> None:
        """Refuse new sequences, let the others end, and free the memory."""
        self._refusal = InvalidInput(f"The adapter {name} was removed.")
        if endings := [stream.cache_freed for stream in self._router.streams.values()]:
            await asyncio.wait(endings)
        await asyncio.to_thread(self.close)
        del self.model, self._manager, self._cache, self.sampler, self._router
        gc.collect()
        torch.cuda.empty_cache()

    def admit(self, prompt: int) -> None:
        """Check that a sequence may run, or wait for the cache.

        Raises:
            EngineDied: The engine has ended.
            InvalidInput: The adapter was removed.
            Unavailable: Too many sequences wait.
        """
        if self._refusal is not None:
            raise self._refusal
        router = self._router
        if router.waiting >= MAX_WAITING_FACTOR * self._sequences or (
            router.waiting
            and router.waiting_tokens + prompt > MAX_WAITING_FACTOR * self.cache_tokens
        ):
            wait_s = min(
                MAX_RETRY_AFTER_S, 1 + int(router.sequence_s * router.waiting / self._sequences)
            )
            raise Unavailable(
                f"{router.waiting} sequences wait for room in the model's cache; try again in"
                f" {wait_s} s. A larger cacheMemory, or more workers, take more.",
                retry_after=wait_s,
            )

    async def _embed(self, prompt: Sequence[int], media: Media) -> SequenceEmbeddings:
        key = (media.digest, tuple(prompt))
        async with self._embedding_lock:
            rows = self._embeddings.get(key)
            if rows is None:
                rows = await asyncio.to_thread(embed_prompt, self.model, prompt, media.features)
                self._embeddings[key] = rows
        return SequenceEmbeddings(rows)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        grammar: GrammarSequence | None = None,
        media: Media | None = None,
    ) -> AsyncGenerator[Tokens, None]:
        """Continue a prompt.

        Raises:
            EngineDied: The engine has ended.
            InvalidInput: The model cannot read the media, or the adapter was removed.
        """
        if self._refusal is not None:
            raise self._refusal
        digest = media.digest if media else b""
        name = sequence_name(
            next(self._numbers), sampling.cache_salt.encode("utf-8", "surrogatepass"), digest
        )
        stream = self._router.open(name, len(prompt))
        try:
            embeddings = None if media is None else await self._embed(prompt, media)
        except BaseException:
            self._router.close([name])
            raise
        self._manager.add_request(
            list(prompt),
            name,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=self.end_tokens,
            **sampling_arguments(sampling, random.getrandbits(31), grammar, embeddings),
        )
        try:
            while True:
                tokens = await stream.tokens.get()
                if isinstance(tokens, EngineDied):
                    raise tokens
                yield tokens
                if tokens.finish_reason:
                    return
        finally:
            if embeddings is not None:  # The engine keeps the last sequences until its next step.
                embeddings.rows = None
            if not stream.cache_freed.done():
                self._manager.cancel_request(name)
                await stream.cache_freed

    def stats(self) -> EngineStats:
        cache = self._cache
        free = cache.compute_free_capacity(relative=False)
        # Blocks that only cache prefixes count as free.
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
        if self._thread.is_alive():
            self._thread.join()


def batching_config(
    model: Any, limits: HuggingFaceConfig, engine_count: int, index: int
) -> ContinuousBatchingConfig:
    """Return the configuration of an engine, which shares the memory with the other engines.

    Raises:
        LoadError: The cache would be too small.
    """
    is_cpu = model.device.type == "cpu"
    sequences = limits.max_sequences or (MAX_CPU_SEQUENCES if is_cpu else MAX_GPU_SEQUENCES)
    config = ContinuousBatchingConfig(
        scheduler_type="tsx", max_requests_per_batch=sequences, allow_block_sharing=True
    )
    if not is_cpu and limits.cache_memory is None:
        # This is a fraction of the memory that earlier engines have left.
        config.max_memory_percent = 0.8 / (engine_count - index)
        return config
    text_config = model.config.get_text_config()
    element_bytes = model.dtype.itemsize
    token_bytes = text_config.num_hidden_layers * FullAttentionCacheAllocator.get_bytes_per_page(
        find_num_key_value_heads(text_config), find_head_dim(text_config), model.dtype, 1
    )
    cache_bytes = limits.cache_memory
    if is_cpu:
        config.page_size = CPU_PAGE_TOKENS
        config.max_batch_tokens = max(CPU_STEP_TOKENS, sequences)
        config.use_cuda_graph = False  # The machine may have a GPU.
        # For each token of the cache, the index has 8 bytes, and a mask has a column.
        token_bytes += 8
        if not is_flash_attention_requested(text_config):
            token_bytes += config.max_batch_tokens * element_bytes
    if cache_bytes is None:
        context = getattr(text_config, "max_position_embeddings", 1 << 20)
        cache_bytes = min(
            free_memory() // CPU_CACHE_DIVISOR, engine_count * token_bytes * sequences * context
        )
    config.num_blocks = cache_bytes // engine_count // token_bytes // config.page_size
    if config.num_blocks < 4:
        raise LoadError(
            f"A cache of {cache_bytes} bytes (cacheMemory, or a quarter of the free memory) is too"
            f" small for the base model and {engine_count - 1} adapters: each gets"
            f" {config.num_blocks * config.page_size} tokens of {token_bytes} bytes. Set"
            " cacheMemory to"
            f" {4 * config.page_size * token_bytes * engine_count} or more."
        )
    return config
