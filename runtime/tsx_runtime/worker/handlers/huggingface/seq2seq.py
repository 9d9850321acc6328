"""Texts from texts, by an encoder and a decoder: summarisation, translation, text2text generation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.loading import Loaded, family
from tsx_runtime.worker.handlers.huggingface.tasks import Request
from tsx_runtime.worker.handlers.huggingface.texts import Encoding, TextRow, TextTask

OUTPUTS = {"summarization": "summary_text", "translation": "translation_text", "text2text-generation": "generated_text"}
LONGEST = 1024  # tokens of an answer, where the model has no bound of its own


class TextToText(TextTask):
    """Requests with equal parameters are generated together."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._name = OUTPUTS[family(loaded.task)]
        positions = getattr(loaded.model.config, "max_position_embeddings", None)
        self._generation = read.generation(positions if isinstance(positions, int) else LONGEST)
        languages = {"src_lang": self._language, "tgt_lang": self._language} if self._name == "translation_text" else {}
        self.parameters = {**self._generation, **languages, "truncation": read.truncation, "clean_up_tokenization_spaces": read.flag}

    def _language(self, value: Any) -> str:
        """T5's are names in its prefixes; of other models each is a token."""
        language = read.string(value)
        if hasattr(self.tokenizer, "src_lang") and self.tokenizer.convert_tokens_to_ids(language) in (None, self.tokenizer.unk_token_id):
            raise ValueError("a language of the model, written as its tokenizer has it")
        return str(language)

    def read(self, request: TaskRequest) -> Request:
        found = super().read(request)
        read.check_generation(found.parameters, self.loaded.model)
        return found

    def rows(self, position: int, request: Request) -> list[TextRow]:
        parameters, config = request.parameters, self.loaded.model.config
        task, source = self.loaded.task, parameters.get("src_lang")
        if source and "tgt_lang" in parameters:
            task = f"translation_{source}_to_{parameters['tgt_lang']}"
        specific = (getattr(config, "task_specific_params", None) or {}).get(task) or {}
        prefix = specific.get("prefix") or getattr(config, "prefix", None) or ""  # T5 is told so what to do
        language = source if hasattr(self.tokenizer, "src_lang") else None
        return [TextRow(position, prefix + text, None, parameters.get("truncation", False), language) for text in request.inputs]

    def key(self, request: Request) -> Hashable:
        options = {name: value for name, value in request.parameters.items() if name in self._generation}
        if hasattr(self.tokenizer, "src_lang") and "tgt_lang" in request.parameters:
            options["forced_bos_token_id"] = self.tokenizer.convert_tokens_to_ids(request.parameters["tgt_lang"])
        return tuple(sorted(options.items()))

    def forward(self, key: Any, inputs: dict[str, torch.Tensor], lengths: list[int]) -> Sequence[Any]:
        found = self.loaded.model.generate(**inputs, **dict(key))
        return list(found.view(len(lengths), -1, found.shape[-1]))

    def output(self, request: Request, encodings: list[Encoding], results: list[Any]) -> Any:
        clean = request.parameters.get("clean_up_tokenization_spaces", False)
        found = [self.tokenizer.batch_decode(each, skip_special_tokens=True, clean_up_tokenization_spaces=clean) for each in results]
        return [{self._name: text} for texts in found for text in texts]

    def example(self) -> TaskRequest:
        return super().example()._replace(parameters={"max_new_tokens": 4})
