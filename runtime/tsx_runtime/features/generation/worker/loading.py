"""The loading of a language model with its tokenizer, weights, engine and adapters."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

import torch

from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import GenerationEngine
from tsx_runtime.features.generation.worker.media import MediaProcessor, capture_language_inputs
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
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")

logger = logging.getLogger("tsx.worker")


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
    text_config, media = config.get_text_config(), None
    end_tokens = find_end_tokens(defaults, text_config, tokenizer)
    engine: GenerationEngine
    if files.config.engine == "vllm":
        engine = await _load_vllm(files, end_tokens)
    else:
        model, media = load_model(files, config)
        prompt_threads = None
        if files.device.type == "cpu" and not context.model_yaml_config.get("threads"):
            prompt_threads = torch.get_num_threads()
            torch.set_num_threads(torch_threads(model.num_parameters(), prompt_threads))
        # Only models of this engine need the import.
        from tsx_runtime.features.generation.worker.engines.transformers_engine import (
            TransformersEngine,
        )

        engine = TransformersEngine(
            model, files.adapters, files.config, end_tokens, tokenizer, prompt_threads
        )
        await engine.start()
    metrics = GenerationMetrics(context.metrics, str(context.system_properties.get("worker", "")))
    return TextGenerator(tokenizer, engine, defaults, text_config.vocab_size, metrics, media)


def find_end_tokens(defaults: Any, config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text.

    They are those of the tokenizer and of generation_config.json. Only if the latter has none, they
    are those of config.json: in it, a missing field has the default of the model's class.
    """
    tokens = config.eos_token_id if defaults.eos_token_id is None else defaults.eos_token_id
    tokens = tokens if isinstance(tokens, list) else [tokens]
    return sorted({*tokens, tokenizer.eos_token_id} - {None})


async def _load_vllm(files: PretrainedFiles, end_tokens: list[int]) -> GenerationEngine:
    if importlib.util.find_spec("vllm") is None:
        raise LoadError(
            "model-config.yaml asks for the engine vllm: pip install 'tsx-serve[vllm]', or choose"
            " another engine."
        )
    # vLLM would send usage statistics to its authors.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM is an extra, which few models use.
    from tsx_runtime.features.generation.worker.engines.vllm_engine import VllmEngine

    return await VllmEngine.load(files, end_tokens)


def load_model(files: PretrainedFiles, config: Any) -> tuple[Any, MediaProcessor | None]:
    """Load the model itself, prepared for inference, and the processor of its images and sounds.

    A model whose media this engine cannot read is loaded for text only, if transformers can.

    Raises:
        LoadError: The model cannot be loaded.
    """
    from transformers import (  # an extra
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoProcessor,
    )

    log_size(files.directory)
    has_processor = any((files.directory / name).is_file() for name in PROCESSOR_FILES)
    if not has_processor or type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return _load_weights(files, AutoModelForCausalLM), None
    model = _load_weights(files, AutoModelForMultimodalLM)
    try:
        with convert_load_errors("The model's processor"):
            processor = AutoProcessor.from_pretrained(
                files.directory, trust_remote_code=files.trusted
            )
        media = MediaProcessor(processor, files.media_urls)
        capture_language_inputs(model)
        media.check(model)
        return model, media
    except LoadError as error:
        text_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if text_class is None:
            raise LoadError(
                f"This engine cannot read the model's images or sounds: {error} A model for images"
                " can be packed with --task image-text-to-text."
            ) from error.__cause__
        logger.warning(
            "the model is loaded for text only, without images or sounds: %s",
            error,
            exc_info=error.__cause__,
        )
    if not isinstance(model, text_class):
        del model
        model = _load_weights(files, AutoModelForCausalLM)
    return model, None


def _load_weights(files: PretrainedFiles, auto_model: Any) -> Any:
    with convert_load_errors("The model"):
        model = auto_model.from_pretrained(
            files.directory, dtype=files.dtype, trust_remote_code=files.trusted
        )
    return prepare_for_inference(model, files)


def torch_threads(parameters: int, cores: int) -> int:
    """Return the number of threads for a model's steps without long prompts.

    Such steps of a small model are short, and each waits for its slowest thread. Therefore one core
    is left for the event loops, which pass on the tokens.
    """
    return max(1, cores - 1) if parameters < SMALL_MODEL_PARAMETERS else cores
