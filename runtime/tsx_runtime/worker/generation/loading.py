"""Loads a language model of an archive: its tokenizer, its weights and adapters, and the engine that runs it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

from tsx_archiver.metadata.huggingface import ADAPTERS, DIRECTORY, MANIFEST_KEY, HuggingFaceConfig, read_huggingface
from tsx_runtime.worker.exceptions import LoadError, in_words
from tsx_runtime.worker.generation.generator import HuggingFaceGenerator
from tsx_runtime.worker.generation.interface import GenerationEngine
from tsx_runtime.worker.generation.load_progress import progress_in_log
from tsx_runtime.worker.generation.metrics import GenerationMetrics
from tsx_runtime.worker.handler_api.context import Context

SAVE_TOKENIZER = "Save it beside the weights: tokenizer.save_pretrained(DIRECTORY)."
SMALL = 100_000_000  # parameters of a model
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class ModelFiles(NamedTuple):
    """What an archive and its configuration say."""

    directory: Path
    adapters: dict[str, Path]
    config: HuggingFaceConfig
    gpu: int | None
    trust: bool  # in code that lies in the directory


async def load(context: Context) -> HuggingFaceGenerator:
    """Raises `LoadError`."""
    try:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig  # an extra
    except ImportError as error:
        raise LoadError(f"A Hugging Face model needs transformers: pip install 'tsx-serve[transformers]' ({error})") from error
    files = files_of(context)
    try:
        config = AutoConfig.from_pretrained(files.directory, local_files_only=True, trust_remote_code=files.trust)
        tokenizer = AutoTokenizer.from_pretrained(files.directory, local_files_only=True, trust_remote_code=files.trust)
        has_defaults = (files.directory / "generation_config.json").is_file()
        defaults = GenerationConfig.from_pretrained(files.directory) if has_defaults else GenerationConfig.from_model_config(config)
    except (OSError, ValueError) as error:
        raise LoadError(f"The model's directory cannot be read: {in_words(error).rstrip('.')}.{unreadable(error)}") from error
    check_vocabulary(tokenizer)
    text = config.get_text_config()
    ends = {defaults.eos_token_id, text.eos_token_id} if not isinstance(defaults.eos_token_id, list) else set(defaults.eos_token_id)
    end_tokens = sorted(id for id in ends | {tokenizer.eos_token_id} if isinstance(id, int))
    engine = await _engine(files, end_tokens, bool(context.model_yaml_config.get("threads")))
    metrics = GenerationMetrics(context.metrics, str(context.system_properties.get("worker", "")))
    return HuggingFaceGenerator(tokenizer, engine, defaults, text.vocab_size, metrics)


def check_vocabulary(tokenizer: Any) -> None:
    """Raises LoadError. Where a directory has no tokenizer, transformers may make one that knows no words."""
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise LoadError(f"The model's directory has no tokenizer. {SAVE_TOKENIZER}")


def unreadable(error: Exception) -> str:
    """What to do about a directory that transformers cannot load, behind its words."""
    return f" {SAVE_TOKENIZER if 'backend tokenizer' in str(error) else 'Is the directory complete, as save_pretrained wrote it?'}"


def files_of(context: Context) -> ModelFiles:
    properties = context.system_properties
    root = Path(properties["model_dir"])
    directory = root / DIRECTORY if (root / DIRECTORY).is_dir() else root
    config, problem = read_huggingface(context.model_yaml_config.get("huggingface") or {})
    if config is None:
        raise LoadError(f"huggingface in model-config.yaml cannot be used: {problem}.")
    names = (context.manifest.get(MANIFEST_KEY) or {}).get("adapters") or []
    adapters = {str(name): directory / ADAPTERS / str(name) for name in names}
    return ModelFiles(directory, adapters, config, properties.get("gpu_id"), bool(properties.get("trust_remote_code")))


async def _engine(files: ModelFiles, end_tokens: list[int], threads_are_set: bool) -> GenerationEngine:
    config = files.config
    has_vllm = importlib.util.find_spec("vllm") is not None
    if config.engine == "vllm" or (config.engine == "auto" and files.gpu is not None and has_vllm):
        if not has_vllm:
            raise LoadError("model-config.yaml asks for the engine vllm: pip install 'tsx-serve[vllm]', or choose another engine.")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would send them to its authors
        from tsx_runtime.worker.generation.vllm_engine import VllmEngine  # an extra, which few models use

        return await VllmEngine.load(files.directory, files.adapters, DTYPES.get(config.dtype, "auto"), config, files.trust, end_tokens)
    from tsx_runtime.worker.generation.transformers_engine import GenerationLimits, TransformersEngine  # only where it runs the model

    model = load_model(files)
    if files.gpu is None and not threads_are_set:
        import torch

        torch.set_num_threads(torch_threads(model.num_parameters(), torch.get_num_threads()))
    engine = TransformersEngine(model, files.adapters, GenerationLimits(config.max_sequences, config.cache_memory), end_tokens)
    await engine.start()
    return engine


def torch_threads(parameters: int, cores: int) -> int:
    """The steps of a small model are short, and each waits for all threads: a core is left to the event loops that tokens pass."""
    return max(1, cores - 1) if parameters < SMALL else cores


def load_model(files: ModelFiles) -> Any:
    """On the worker's device. The precision auto is the checkpoint's, except for fp16 on a CPU, which has no fast way to compute in it."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    dtype: Any = DTYPES.get(files.config.dtype, "auto")
    device = torch.device("cpu") if files.gpu is None else torch.device("cuda", files.gpu)
    try:
        with progress_in_log(files.directory):
            model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=dtype, local_files_only=True, trust_remote_code=files.trust)
    except UnpicklingError as error:
        raise LoadError(
            "The weights are a pickle that holds more than weights, so it is not read. Save the model again as safetensors."
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"The model cannot be loaded: {in_words(error).rstrip('.')}.{unreadable(error)}") from error
    if dtype == "auto" and files.gpu is None and model.dtype == torch.float16:
        model = model.float()
    return model.to(device).eval()
