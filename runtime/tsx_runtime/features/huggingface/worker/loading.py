"""The loading of a Hugging Face model with its tokenizer or pipeline, and its adapters."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tsx_archiver.metadata.huggingface import MODULES, family
from tsx_runtime.features.generation.worker.pretrained import (
    PretrainedFiles,
    check_vocabulary,
    convert_load_errors,
    load_adapter,
    log_size,
    prepare_for_inference,
)
from tsx_runtime.features.huggingface.worker.batches import ACCELERATOR, CPU, Budget

# For tasks that use no pipeline: the class that loads the model.
AUTO_CLASSES = {
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
    """A loaded model, with the objects that its task needs."""

    task: str
    directory: Path
    model: Any
    tokenizer: Any  # None if the model takes no text
    pipeline: Any  # None for the tasks of AUTO_CLASSES
    device: torch.device
    adapters: Mapping[str, Any]  # the model with each adapter; all share the base model's tensors
    budget: Budget

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens in a row; None if there is no limit."""
        limit = self.tokenizer.model_max_length
        return limit if limit < 1 << 30 else None


def load(files: PretrainedFiles) -> Loaded:
    """Load a model, whose weights are mapped from its files.

    Raises:
        LoadError: The model cannot be loaded.
    """
    task, directory, device, start = files.task, files.directory, files.device, time.monotonic()
    options: dict[str, Any] = {"dtype": files.dtype, "trust_remote_code": files.trusted}
    pipeline = None
    with convert_load_errors("The model", f"cannot be loaded for the task {task!r}"):
        import transformers  # an extra

        log_size(directory)
        if (name := AUTO_CLASSES.get(family(task))) is None:
            pipeline = transformers.pipeline(task, model=str(directory), device=device, **options)
            model, tokenizer = pipeline.model, pipeline.tokenizer
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, trust_remote_code=files.trusted
            )
            if task == "text-ranking" and (directory / MODULES).is_file():
                name = "AutoModel"  # This is a sentence model, which ranks texts by similarity.
            model = getattr(transformers, name).from_pretrained(directory, **options)
    model = prepare_for_inference(model, files)
    if tokenizer is not None:
        _prepare_tokenizer(tokenizer, model)
    adapters = {name: load_adapter(model, name, path) for name, path in files.adapters.items()}
    logger.info(
        "loaded %s for %s in %s on %s in %.1f s",
        type(model).__name__,
        task,
        model.dtype,
        device,
        time.monotonic() - start,
    )
    budget = CPU if device.type == "cpu" else ACCELERATOR
    return Loaded(task, directory, model, tokenizer, pipeline, device, adapters, budget)


def _prepare_tokenizer(tokenizer: Any, model: Any) -> None:
    """Set a padding token, and limit rows to the number of positions of the model.

    Raises:
        LoadError: The tokenizer has no vocabulary.
    """
    check_vocabulary(tokenizer)
    max_positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(max_positions, int):
        for name, module in model.named_modules():
            if (
                name.endswith("position_embeddings")
                and getattr(module, "padding_idx", None) is not None
            ):
                # In RoBERTa, the first position follows the position for padding.
                max_positions = module.num_embeddings - module.padding_idx - 1
        tokenizer.model_max_length = min(tokenizer.model_max_length, max_positions)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None and tokenizer.pad_token is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
