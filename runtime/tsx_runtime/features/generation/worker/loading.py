"""The loading of a language model with its tokenizer, weights, engine and adapters."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import GenerationEngine
from tsx_runtime.features.generation.worker.metrics import GenerationMetrics
from tsx_runtime.features.generation.worker.pretrained import (
    PretrainedFiles,
    check_vocabulary,
    convert_load_errors,
    log_size,
    prepare_for_inference,
)
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context

SMALL_MODEL_PARAMETERS = 100_000_000


async def load(files: PretrainedFiles, context: Context) -> TextGenerator:
    """Load the text generator of an archive.

    Raises:
        LoadError: The model, its tokenizer or its engine cannot be loaded.
    """
    with convert_load_errors("The model's directory", "cannot be read"):
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # an extra

        config = AutoConfig.from_pretrained(files.directory, trust_remote_code=files.trusted)
        tokenizer = AutoTokenizer.from_pretrained(files.directory, trust_remote_code=files.trusted)
        has_defaults = (files.directory / "generation_config.json").is_file()
        defaults = (
            GenerationConfig.from_pretrained(files.directory)
            if has_defaults
            else GenerationConfig.from_model_config(config)
        )
    check_vocabulary(tokenizer)
    text_config = config.get_text_config()
    end_token_ids = (
        {defaults.eos_token_id, text_config.eos_token_id}
        if not isinstance(defaults.eos_token_id, list)
        else set(defaults.eos_token_id)
    )
    end_tokens = sorted(
        id for id in end_token_ids | {tokenizer.eos_token_id} if isinstance(id, int)
    )
    engine = await _load_engine(
        files, end_tokens, tokenizer, bool(context.model_yaml_config.get("threads"))
    )
    metrics = GenerationMetrics(context.metrics, str(context.system_properties.get("worker", "")))
    return TextGenerator(tokenizer, engine, defaults, text_config.vocab_size, metrics)


async def _load_engine(
    files: PretrainedFiles, end_tokens: list[int], tokenizer: Any, has_thread_setting: bool
) -> GenerationEngine:
    if files.config.engine == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise LoadError(
                "model-config.yaml asks for the engine vllm: pip install 'tsx-serve[vllm]', or"
                " choose another engine."
            )
        # vLLM would send usage statistics to its authors.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # vLLM is an extra, which few models use.
        from tsx_runtime.features.generation.worker.vllm_engine import VllmEngine

        return await VllmEngine.load(files, end_tokens)
    model = load_model(files)
    if files.device.type == "cpu" and not has_thread_setting:
        torch.set_num_threads(torch_threads(model.num_parameters(), torch.get_num_threads()))
    # Only models of this engine need the import.
    from tsx_runtime.features.generation.worker.transformers_engine import TransformersEngine

    engine = TransformersEngine(model, files.adapters, files.config, end_tokens, tokenizer)
    await engine.start()
    return engine


def load_model(files: PretrainedFiles) -> Any:
    """Load the model itself, and prepare it for inference.

    Raises:
        LoadError: The model cannot be loaded.
    """
    with convert_load_errors("The model"):
        from transformers import AutoModelForCausalLM  # an extra

        log_size(files.directory)
        model = AutoModelForCausalLM.from_pretrained(
            files.directory, dtype=files.dtype, trust_remote_code=files.trusted
        )
    return prepare_for_inference(model, files)


def torch_threads(parameters: int, cores: int) -> int:
    """Return the number of threads for a model's computations.

    The steps of a small model are short, and each step waits for its slowest thread. Therefore one
    core is left for the event loops, which pass on the tokens.
    """
    return max(1, cores - 1) if parameters < SMALL_MODEL_PARAMETERS else cores
