"""Tasks of encoder-decoder models: summarization, translation, text2text generation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from tsx_archiver.metadata.huggingface import family
from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.huggingface.worker import requests as read
from tsx_runtime.features.huggingface.worker.loading import Loaded
from tsx_runtime.features.huggingface.worker.tasks import Request, Unit
from tsx_runtime.features.huggingface.worker.texts import EXAMPLE, TextRow, TextTask
from tsx_runtime.worker.exceptions import InvalidInput

OUTPUT_NAMES = {
    "summarization": "summary_text",
    "translation": "translation_text",
    "text2text-generation": "generated_text",
}
DEFAULT_MAX_TOKENS = 1024  # the limit of a response if the model has no limit


class TextToText(TextTask):
    """A task that generates a text from a text.

    Texts for requests with equal parameters are generated together.
    """

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._output_name = OUTPUT_NAMES[family(loaded.task)]
        positions = getattr(loaded.model.config, "max_position_embeddings", None)
        self._generation_parameters = read.generation(
            positions if isinstance(positions, int) else DEFAULT_MAX_TOKENS
        )
        language: read.Reader = TypeAdapter(Annotated[str, AfterValidator(self._check_language)])
        languages = (
            {"src_lang": language, "tgt_lang": language}
            if self._output_name == "translation_text"
            else {}
        )
        self.parameters = {
            **self._generation_parameters,
            **languages,
            "truncation": read.truncation,
            "clean_up_tokenization_spaces": read.flag,
        }

    def _check_language(self, language: str) -> str:
        """Check that a language is a token of the model; T5 accepts any name as part of a prefix.

        Raises:
            ValueError: The tokenizer has no such token.
        """
        if hasattr(self.tokenizer, "src_lang") and self.tokenizer.convert_tokens_to_ids(
            language
        ) in (None, self.tokenizer.unk_token_id):
            raise ValueError("it must be a language of the model, written as its tokenizer has it")
        return language

    def read(self, request: TaskRequest) -> Request:
        result = super().read(request)
        parameters = result.parameters
        sequence_count = parameters.get("num_return_sequences", 1)
        beams = parameters.get("num_beams") or self.loaded.model.generation_config.num_beams or 1
        if sequence_count > beams and not (beams == 1 and parameters.get("do_sample")):
            raise InvalidInput(
                f"num_return_sequences is {sequence_count}: that takes as many num_beams, or"
                " do_sample."
            )
        return result

    def rows(self, request: Request) -> list[TextRow]:
        parameters, config = request.parameters, self.loaded.model.config
        task, source = self.loaded.task, parameters.get("src_lang")
        if source and "tgt_lang" in parameters:
            task = f"translation_{source}_to_{parameters['tgt_lang']}"
        task_settings = (getattr(config, "task_specific_params", None) or {}).get(task) or {}
        # T5 recognizes its task by the prefix.
        prefix = task_settings.get("prefix") or getattr(config, "prefix", None) or ""
        language = source if hasattr(self.tokenizer, "src_lang") else None
        is_cut = parameters.get("truncation", False)
        return [
            TextRow(number, prefix + text, None, is_cut, language)
            for number, text in enumerate(request.inputs)
        ]

    def key(self, request: Request) -> Hashable:
        options = {
            name: value
            for name, value in request.parameters.items()
            if name in self._generation_parameters
        }
        if hasattr(self.tokenizer, "src_lang") and "tgt_lang" in request.parameters:
            options["forced_bos_token_id"] = self.tokenizer.convert_tokens_to_ids(
                request.parameters["tgt_lang"]
            )
        return tuple(sorted(options.items()))

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        options: Any = units[0].key
        sequences = self.model.generate(**self.padded(units), **dict(options))
        return list(sequences.view(len(units), -1, sequences.shape[-1]))

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        clean = request.parameters.get("clean_up_tokenization_spaces", False)
        outputs = [
            self.tokenizer.batch_decode(
                sequences, skip_special_tokens=True, clean_up_tokenization_spaces=clean
            )
            for (sequences,) in parts
        ]
        return [{self._output_name: text} for texts in outputs for text in texts]

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {"max_new_tokens": 4})
