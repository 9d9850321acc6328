"""An engine for text generation by vLLM's AsyncLLM, which runs its engine in another process."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from tsx_runtime.errors import Unavailable
from tsx_runtime.features.generation.worker.interface import (
    EngineStats,
    Grammar,
    Media,
    Sampling,
    TokenLogprob,
    Tokens,
)
from tsx_runtime.features.generation.worker.pretrained import PretrainedFiles
from tsx_runtime.worker.exceptions import EngineDied, LoadError, describe_error

MAX_WAITING_FACTOR = 4  # the limit of waiting sequences, as a multiple of those that can run


class CacheRecorder(StatLoggerBase):  # type: ignore[misc]  # vLLM is an extra
    """A logger that keeps the newest statistics, which the engine sends with each step."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.cache_use = 0.0

    def record(
        self, scheduler_stats: Any = None, iteration_stats: Any = None, *more: Any, **named: Any
    ) -> None:
        if scheduler_stats is not None:
            self.cache_use = float(scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class VllmEngine:
    """An engine for a model and its adapters."""

    def __init__(
        self,
        llm: Any,
        adapters: Mapping[str, Path],
        end_tokens: Sequence[int],
        recorder: CacheRecorder,
    ) -> None:
        config = llm.vllm_config
        self.context_length = int(config.model_config.max_model_len)
        self.adapters = list(adapters)
        self._sequences = int(config.scheduler_config.max_num_seqs)
        self._llm = llm
        self._lora = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(adapters.items(), 1)
        }
        self._end_tokens = list(end_tokens)
        self._recorder = recorder
        self._names = map(str, itertools.count())
        self._has_token: dict[str, bool] = {}  # whether each running sequence has a token yet

    @classmethod
    async def load(cls, files: PretrainedFiles, end_tokens: Sequence[int]) -> VllmEngine:
        """Start vLLM, and generate two tokens.

        Raises:
            LoadError: vLLM cannot run the model.
        """
        config, adapters = files.config, files.adapters
        arguments: dict[str, Any] = {
            "model": str(files.directory),
            "dtype": files.dtype,
            "trust_remote_code": files.trusted,
        }
        if config.max_sequences is not None:
            arguments["max_num_seqs"] = config.max_sequences
        if config.cache_memory is not None:
            arguments["kv_cache_memory_bytes"] = config.cache_memory
        recorder = CacheRecorder()
        try:
            if adapters:
                arguments |= {
                    "enable_lora": True,
                    "max_loras": len(adapters),
                    "max_lora_rank": max(map(supported_rank, adapters.values())),
                }
            llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(enable_prefix_caching=True, **arguments),
                stat_loggers=[lambda *_: recorder],
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise LoadError(f"vLLM cannot run this model: {describe_error(error)}") from error
        engine = cls(llm, adapters, end_tokens, recorder)
        try:
            async for _ in engine.generate([0] * 8, Sampling(max_tokens=2, temperature=0.0)):
                pass
        except EngineDied as error:
            raise LoadError(f"The model cannot generate text: {error}") from error
        return engine

    async def add_adapter(self, name: str, directory: Path) -> None:
        raise LoadError("The engine vllm serves the adapters of the archive only.")

    def remove_adapter(self, name: str) -> None:
        """Do nothing, since no adapter was added."""

    def refusal(self, sampling: Sampling) -> str | None:
        return None

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, media: Media | None = None
    ) -> AsyncGenerator[Tokens, None]:
        if self._llm.errored:
            raise EngineDied("vLLM's engine has ended. Its worker is started again.")
        waiting = sum(not has_token for has_token in self._has_token.values())
        if waiting >= MAX_WAITING_FACTOR * self._sequences:
            wait_s = 1 + waiting // self._sequences
            raise Unavailable(
                f"{waiting} sequences wait for room in the model's cache; try again in {wait_s} s.",
                retry_after=wait_s,
            )
        return self._generate(prompt, sampling)

    def stats(self) -> EngineStats:
        running = sum(self._has_token.values())
        return EngineStats(
            running,
            len(self._has_token) - running,
            self._recorder.cache_use if self._has_token else 0.0,
        )

    async def close(self) -> None:
        self._llm.shutdown()

    async def _generate(
        self, prompt: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Tokens, None]:
        name = next(self._names)
        self._has_token[name] = False
        lora = self._lora.get(sampling.adapter or "")
        try:
            outputs = self._llm.generate(
                {"prompt_token_ids": list(prompt), "cache_salt": sampling.cache_salt},
                self._params(sampling),
                name,
                lora_request=lora,
            )
            async with aclosing(outputs):  # When the generator is closed, vLLM ends the sequence.
                async for output in outputs:
                    cached_tokens = 0 if self._has_token[name] else output.num_cached_tokens or 0
                    self._has_token[name] = True
                    tokens = convert_tokens(output.outputs[0], sampling.top_logprobs)
                    yield tokens._replace(cached_tokens=cached_tokens)
        except EngineDeadError as error:
            raise EngineDied(
                f"vLLM's engine has ended: {describe_error(error)}. Its worker is started again."
            ) from error
        finally:
            del self._has_token[name]

    def _params(self, sampling: Sampling) -> Any:
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature or 0.0,
            top_p=1.0 if sampling.top_p is None else max(sampling.top_p, 1e-6),
            top_k=sampling.top_k or 0,
            seed=sampling.seed,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            logit_bias=dict(sampling.logit_bias or {}) or None,
            logprobs=sampling.top_logprobs if sampling.logprobs else None,
            stop_token_ids=self._end_tokens,
            structured_outputs=structured_outputs(sampling.grammar),
            detokenize=False,  # `text.py` decodes the tokens of all engines.
            output_kind=RequestOutputKind.DELTA,
        )


def structured_outputs(grammar: Grammar | None) -> Any:
    """Return vLLM's parameters for a grammar, or None."""
    if grammar is None:
        return None
    kind, text, _ = grammar
    if kind == "choice":
        return StructuredOutputsParams(choice=json.loads(text))
    names = {"json_schema": "json", "regex": "regex", "lark": "grammar"}
    return StructuredOutputsParams(**{names[kind]: text})


def convert_tokens(completion: Any, top_count: int) -> Tokens:
    """Convert the tokens of vLLM's CompletionOutput.

    For each token, its logprobs are a dict by token id, which has the chosen token and the
    `top_count` most likely ones.
    """
    ids = list(completion.token_ids)
    finish_reason = (
        None
        if completion.finish_reason is None
        else "length"
        if completion.finish_reason == "length"
        else "stop"
    )
    logprobs = [
        TokenLogprob(
            id,
            logprobs_by_id[id].logprob,
            [
                (token_id, logprob.logprob)
                for token_id, logprob in logprobs_by_id.items()
                if logprob.rank <= top_count
            ],
        )
        for id, logprobs_by_id in zip(ids, completion.logprobs or [], strict=False)
    ]
    return Tokens(ids, finish_reason, logprobs)  # type: ignore[arg-type]


def supported_rank(adapter: Path) -> int:
    """Return the smallest rank of vLLM's kernels that fits an adapter: a power of two, at least 8.

    vLLM itself refuses ranks that are too large.
    """
    rank = int(json.loads((adapter / "adapter_config.json").read_text())["r"])
    return max(8, 1 << (rank - 1).bit_length())
