"""The vLLM engine, with a small fake of the documented `AsyncLLM`, since vLLM needs a GPU."""

from __future__ import annotations

import asyncio
import importlib
import sys
import types
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtime.features.generation.conftest import Run
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.errors import Unavailable
from tsx_runtime.features.generation.worker import loading
from tsx_runtime.features.generation.worker.interface import Grammar, Sampling, TokenLogprob
from tsx_runtime.features.generation.worker.pretrained import PretrainedFiles
from tsx_runtime.worker.exceptions import EngineDied, LoadError
from tsx_runtime.worker.handler_api.testing import MockContext


class Namespace:
    def __init__(self, *values: Any, **options: Any) -> None:
        self.values, self.named = values, options


class EngineDead(Exception):
    pass


class FakeLLM:
    """A fake that answers with the prompt's tokens and a final 0; it waits at a token 9."""

    instance: Any = None

    def __init__(self, arguments: dict[str, Any], stat_loggers: list[Any]) -> None:
        FakeLLM.instance = self
        if arguments.get("max_lora_rank", 8) > 512:
            raise ValueError("max_lora_rank should be 1, 8, 16, 32, 64, 128, 256, 320 or 512")
        if arguments["model"].endswith("bad"):
            raise ValueError("no such architecture")
        self.arguments = arguments
        self.stats = stat_loggers[0](None, 0)
        self.errored = self.is_shut = False
        self.calls: list[tuple[dict[str, Any], Any]] = []
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=512),
            scheduler_config=SimpleNamespace(max_num_seqs=arguments.get("max_num_seqs", 256)),
        )

    @classmethod
    def from_engine_args(cls, arguments: Any, stat_loggers: list[Any]) -> FakeLLM:
        return cls(arguments.named, stat_loggers)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        self.calls.append((params.named, lora_request))
        ids = [*prompt["prompt_token_ids"][: params.named["max_tokens"]], 0]
        try:
            for index, id in enumerate(ids):
                if id == 9:
                    await self.gate.wait()
                if self.errored:
                    raise EngineDead("the core is gone")
                self.stats.record(SimpleNamespace(kv_cache_usage=0.25), None)
                likely = {
                    id: SimpleNamespace(logprob=-0.5, rank=2),
                    7: SimpleNamespace(logprob=-0.25, rank=1),
                }
                reason = None if index < len(ids) - 1 else "stop"
                logprobs = None if params.named["logprobs"] is None else [likely]
                yield SimpleNamespace(
                    num_cached_tokens=len(prompt["cache_salt"]),
                    outputs=[
                        SimpleNamespace(token_ids=[id], finish_reason=reason, logprobs=logprobs)
                    ],
                )
        except GeneratorExit:
            self.aborted.append(request_id)
            raise

    def shutdown(self) -> None:
        self.is_shut = True


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": Namespace},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": Namespace},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": Namespace},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(DELTA="delta"),
            "StructuredOutputsParams": Namespace,
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": FakeLLM},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDead},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": object},
    }
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    module = importlib.import_module("tsx_runtime.features.generation.worker.engines.vllm_engine")
    yield module.VllmEngine
    del sys.modules[module.__name__]


def pretrained_files(
    directory: str | Path = "/models/m", adapters: Any = (), **config: Any
) -> PretrainedFiles:
    return PretrainedFiles(
        Path(directory),
        dict(adapters),
        "text-generation",
        HuggingFaceConfig(**config),
        "bfloat16",
        torch.device("cuda", 0),
        False,
    )


def load(run: Run, engine_class: Any, *arguments: Any, **config: Any) -> Any:
    return run(engine_class.load(pretrained_files(*arguments, **config), [0]))


async def collect(engine: Any, prompt: list[int], sampling: Sampling) -> list[Any]:
    return [tokens async for tokens in engine.generate(prompt, sampling)]


def test_tokens_and_logprobs_come_from_vllm(run: Run, engine_class: Any) -> None:
    engine = load(run, engine_class, max_sequences=8, cache_memory=1 << 30)
    assert (
        FakeLLM.instance.arguments.items()
        >= {
            "model": "/models/m",
            "dtype": "bfloat16",
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": True,
        }.items()
    )
    assert engine.context_length == 512
    sampling = Sampling(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        seed=1,
        logprobs=True,
        top_logprobs=1,
        cache_salt="a salt",
    )
    answer = run(collect(engine, [3, 4], sampling))
    assert [(tokens.token_ids, tokens.finish_reason) for tokens in answer] == [
        ([3], None),
        ([4], None),
        ([0], "stop"),
    ]
    assert [tokens.cached_tokens for tokens in answer] == [6, 0, 0]
    assert answer[0].logprobs == [TokenLogprob(3, -0.5, [(7, -0.25)])]
    params, lora = FakeLLM.instance.calls[-1]
    assert lora is None
    assert (
        params.items()
        >= {
            "max_tokens": 5,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 3,
            "seed": 1,
            "logprobs": 1,
            "output_kind": "delta",
            "detokenize": False,
            "structured_outputs": None,
            "frequency_penalty": 0.0,
            "logit_bias": None,
        }.items()
    )
    assert params["stop_token_ids"] == [0]
    run(engine.close())
    assert FakeLLM.instance.is_shut


def test_schema_adapter_and_penalties_are_passed_to_vllm(
    run: Run, engine_class: Any, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 12}')
    engine = load(run, engine_class, adapters={"polite": tmp_path})
    assert (
        FakeLLM.instance.arguments["max_loras"],
        FakeLLM.instance.arguments["max_lora_rank"],
    ) == (1, 16)
    sampling = Sampling(max_tokens=2, adapter="polite", grammar=Grammar("json_schema", "{}"))
    run(collect(engine, [3], sampling))
    params, lora = FakeLLM.instance.calls[-1]
    assert params["structured_outputs"].named == {"json": "{}"}
    assert lora.values == ("polite", 1, str(tmp_path))
    penalties = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "logit_bias": {3: 2.0}}
    run(
        collect(
            engine, [3], Sampling(max_tokens=2, grammar=Grammar("choice", '["a"]'), **penalties)
        )
    )
    params, _ = FakeLLM.instance.calls[-1]
    assert params.items() >= (penalties | {"repetition_penalty": 1.0}).items()
    assert params["structured_outputs"].named == {"choice": ["a"]}


def test_closing_ends_the_sequence(run: Run, engine_class: Any) -> None:
    engine = load(run, engine_class)

    async def leave() -> Any:
        async with aclosing(engine.generate([3, 4, 5], Sampling(max_tokens=9))) as stream:
            await anext(stream)
            return engine.stats()

    assert run(leave()) == (1, 0, 0.25)
    assert engine.stats() == (0, 0, 0.0)
    assert len(FakeLLM.instance.aborted) == 1


def test_a_sequence_is_refused_if_too_many_wait(run: Run, engine_class: Any) -> None:
    engine = load(run, engine_class, max_sequences=1)

    async def crowd() -> None:
        tasks = [
            asyncio.create_task(collect(engine, [9], Sampling(max_tokens=2))) for _ in range(4)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="4 sequences wait") as exc_info:
            engine.generate([3], Sampling(max_tokens=2))
        assert exc_info.value.retry_after == 5
        FakeLLM.instance.gate.set()
        await asyncio.gather(*tasks)

    run(crowd())


def test_an_engine_that_dies_ends_its_streams_and_refuses_new_ones(
    run: Run, engine_class: Any
) -> None:
    engine = load(run, engine_class)

    async def die() -> None:
        stream = engine.generate([3, 4], Sampling(max_tokens=2))
        await anext(stream)
        FakeLLM.instance.errored = True
        with pytest.raises(EngineDied, match="the core is gone"):
            await anext(stream)
        with pytest.raises(EngineDied, match="Its worker is started again"):
            engine.generate([3], Sampling(max_tokens=2))

    run(die())


def test_a_model_that_vllm_rejects_does_not_load(
    run: Run, engine_class: Any, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match="ValueError: no such architecture"):
        load(run, engine_class, "/models/bad")
    (tmp_path / "adapter_config.json").write_text('{"r": 1000}')
    with pytest.raises(LoadError, match="max_lora_rank should be"):
        load(run, engine_class, adapters={"large": tmp_path})


@pytest.mark.parametrize("engine", ["auto", "transformers"])
def test_vllm_runs_a_model_only_by_its_name(
    run: Run, llama: Path, engine_class: Any, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(
        loading, "load_model", lambda files, config: pytest.fail(files.config.engine)
    )
    context = MockContext()
    with pytest.raises(pytest.fail.Exception, match=engine):
        run(loading.load(pretrained_files(llama, engine=engine), context))
    generator = run(loading.load(pretrained_files(llama, engine="vllm"), context))
    assert isinstance(generator._engine, engine_class)
