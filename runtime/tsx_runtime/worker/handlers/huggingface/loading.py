"""Loads the model of a Hugging Face directory with what prepares its inputs, in the wanted precision, its weights mapped from its files."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch

from tsx_archiver.metadata.huggingface import DIRECTORY
from tsx_archiver.metadata.huggingface import MANIFEST_KEY as KEY
from tsx_runtime.worker.exceptions import LoadError, in_words
from tsx_runtime.worker.generation.load_progress import progress_in_log
from tsx_runtime.worker.generation.loading import check_vocabulary, unreadable
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.huggingface.adapters import Adapters
from tsx_runtime.worker.handlers.huggingface.batches import Budget, budget_of
from tsx_runtime.worker.handlers.models.precision import DTYPES

AUTO = {  # tasks that transformers has no pipeline for, or whose pipeline is not used: the class that loads their model
    "question-answering": "AutoModelForQuestionAnswering",
    "feature-extraction": "AutoModel",
    "sentence-similarity": "AutoModel",
    "text-ranking": "AutoModelForSequenceClassification",
    "summarization": "AutoModelForSeq2SeqLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "translation": "AutoModelForSeq2SeqLM",
}

logger = logging.getLogger("tsx.worker")


class Loaded(NamedTuple):
    """A model that is ready, and what its task needs."""

    task: str
    directory: Path
    model: Any
    tokenizer: Any  # None where the model takes no text
    pipeline: Any  # transformers' own, for its preprocessing and postprocessing; None for the tasks of AUTO
    device: torch.device
    adapters: Adapters
    budget: Budget

    @property
    def most_tokens(self) -> int | None:
        """That the model takes in one row; None where there is no bound."""
        limit = self.tokenizer.model_max_length
        return limit if limit < 1 << 30 else None


def load(context: Context, device: torch.device) -> Loaded:
    """Raises LoadError."""
    directory = Path(context.system_properties["model_dir"]) / DIRECTORY
    if not (directory / "config.json").is_file():
        raise LoadError(f"The archive has no {DIRECTORY}/config.json. Pack the model's directory with `tsx archive DIRECTORY`.")
    said: Mapping[str, Any] = context.model_yaml_config.get(KEY) or {}
    packed: Mapping[str, Any] = context.manifest.get(KEY) or {}
    task = str(said.get("task") or packed.get("task") or "")
    dtype = _dtype(said.get("dtype") or context.model_yaml_config.get("precision") or "auto")
    trusted = bool(context.system_properties.get("trust_remote_code"))
    began = time.monotonic()
    with progress_in_log(directory):
        model, tokenizer, pipeline = _from_directory(task, directory, device, dtype, trusted)
    if dtype == "auto" and device.type == "cpu" and model.dtype == torch.float16:
        model.float()  # on a CPU half precision is many times as slow
    model.eval().requires_grad_(False)
    if tokenizer is not None:
        _prepare(tokenizer, model)
    adapters = Adapters(model, directory / "adapters", packed.get("adapters") or (), device)
    logger.info("loaded %s for %s in %s on %s in %.1f s", type(model).__name__, task, model.dtype, device, time.monotonic() - began)
    return Loaded(task, directory, model, tokenizer, pipeline, device, adapters, budget_of(device))


def _from_directory(task: str, directory: Path, device: torch.device, dtype: Any, trusted: bool) -> tuple[Any, Any, Any]:
    try:
        import transformers  # an extra, as what it brings along
        from safetensors import SafetensorError
    except ModuleNotFoundError as error:
        raise LoadError("Hugging Face models are loaded by transformers: pip install 'tsx-serve[transformers]'") from error
    try:
        if (name := AUTO.get(family(task))) is None:
            pipeline = transformers.pipeline(task, model=str(directory), device=device, dtype=dtype, trust_remote_code=trusted)
            return pipeline.model, pipeline.tokenizer, pipeline
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=trusted)
        if task == "text-ranking" and (directory / "modules.json").is_file():
            name = "AutoModel"  # a sentence model ranks by likeness
        model = getattr(transformers, name).from_pretrained(directory, dtype=dtype, trust_remote_code=trusted)
        return model.to(device), tokenizer, None
    except UnpicklingError as error:
        raise LoadError(
            "The weights are a pickle that holds more than weights, so it is not read. Save the model again as safetensors."
        ) from error
    except (ImportError, RuntimeError, ValueError, KeyError, OSError, SafetensorError) as error:
        raise LoadError(f"The model cannot be loaded for the task {task!r}: {in_words(error).rstrip('.')}.{_hint(error)}") from error


def family(task: str) -> str:
    """`translation` of `translation_en_to_de`."""
    return "translation" if task.startswith("translation_") else task


def _hint(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return " The model brings code of its own: allow it with the setting trust_remote_code if you trust its author."
    if isinstance(error, ImportError):
        return " Install that package where tsx runs."
    return unreadable(error)


def _dtype(name: Any) -> Any:
    if name == "auto":
        return name
    if not isinstance(name, str) or name.lower() not in DTYPES:
        raise LoadError(f"huggingface.dtype in model-config.yaml is {name!r}; it must be auto, {', '.join(DTYPES)}.")
    return DTYPES[name.lower()]


def _prepare(tokenizer: Any, model: Any) -> None:
    """Rows get a padding that models can mask, and no more tokens than the model has positions. Raises LoadError."""
    check_vocabulary(tokenizer)
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int):
        for name, module in model.named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                positions = module.num_embeddings - module.padding_idx - 1  # RoBERTa's begin behind that of the padding
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None and tokenizer.pad_token is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
