"""Labels of texts: text classification, zero-shot classification, token classification, masked words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsx_runtime.worker.exceptions import BadRows, InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.media import plain
from tsx_runtime.worker.handlers.huggingface.requests import Reader
from tsx_runtime.worker.handlers.huggingface.tasks import Request, a_text
from tsx_runtime.worker.handlers.huggingface.texts import Encoding, TextRow, TextTask, unzipped

TOKEN_FIELDS = ("input_ids", "special_tokens_mask", "offset_mapping")


class TextClassification(TextTask):
    parameters: Mapping[str, Reader] = {**read.FUNCTION, "truncation": read.truncation}

    def read_input(self, given: Any, parameters: dict[str, Any]) -> tuple[str, str | None]:
        if not isinstance(given, dict):
            return a_text(given), None
        if set(given) != {"text", "text_pair"}:
            raise InvalidInput('A pair of texts is {"text": "...", "text_pair": "..."}.')
        return a_text(given["text"], "text"), a_text(given["text_pair"], "text_pair")

    def rows(self, position: int, request: Request) -> list[TextRow]:
        return [TextRow(position, text, pair, request.parameters.get("truncation", False)) for text, pair in request.inputs]

    def output(self, request: Request, encodings: list[Encoding], results: list[Any]) -> Any:
        """A list of labels in a list also for one text: that is the API's shape."""
        chosen = {"top_k": None} | {name: request.parameters[name] for name in read.FUNCTION if name in request.parameters}
        after = self.loaded.pipeline._sanitize_parameters(**chosen)[2]
        return [self.loaded.pipeline.postprocess({"logits": row[None]}, **after) for row in results]


class ZeroShotClassification(TextTask):
    parameters: Mapping[str, Reader] = {"candidate_labels": read.labels, "hypothesis_template": read.template, "multi_label": read.flag}
    required = ("candidate_labels",)

    def rows(self, position: int, request: Request) -> list[TextRow]:
        template = request.parameters.get("hypothesis_template", "This example is {}.")
        hypotheses = [template.replace("{}", label) for label in request.parameters["candidate_labels"]]
        return [TextRow(position, text, hypothesis, "only_first") for text in request.inputs for hypothesis in hypotheses]

    def output(self, request: Request, encodings: list[Encoding], results: list[Any]) -> Any:
        labels, outputs = request.parameters["candidate_labels"], []
        for start in range(0, len(results), len(labels)):
            some = zip(labels, results[start : start + len(labels)], strict=True)
            parts = [{"candidate_label": label, "sequence": "", "logits": row[None]} for label, row in some]
            found = self.loaded.pipeline.postprocess(parts, multi_label=request.parameters.get("multi_label", False))
            outputs.append([{"label": label, "score": score} for label, score in zip(found["labels"], found["scores"], strict=True)])
        return request.shaped(outputs)

    def example(self) -> TaskRequest:
        return super().example()._replace(parameters={"candidate_labels": ["fast", "slow"]})


class TokenClassification(TextTask):
    """A text that is longer than the model takes is cut, as transformers does, or read in overlapping parts where `stride` says so."""

    parameters: Mapping[str, Reader] = {
        "aggregation_strategy": read.one_of("none", "simple", "first", "average", "max"),
        "ignore_labels": read.strings,
        "stride": read.whole(0, 1 << 20),
    }

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.options = {"return_special_tokens_mask": True, "return_offsets_mapping": self.tokenizer.is_fast}

    def rows(self, position: int, request: Request) -> list[TextRow]:
        return [TextRow(position, text, None, True) for text in request.inputs]

    def encoded(self, requests: Sequence[Request]) -> tuple[list[TextRow], list[Encoding]]:
        faults, rows, encodings = dict[int, str](), list[TextRow](), list[Encoding]()
        for position, request in enumerate(requests):
            try:
                self._after(request)
                stride, room = request.parameters.get("stride", 0), self.loaded.most_tokens or 1 << 30
                if stride > (most := (room - self.tokenizer.num_special_tokens_to_add()) * 9 // 10):
                    raise ValueError(f"`stride` is {stride}; it is at most {most}, as parts that overlap more are too many.")
            except ValueError as error:
                faults[position] = str(error)
        if faults:
            raise BadRows(faults)
        for row, encoding in zip(*super().encoded(requests), strict=True):
            stride = requests[row.request].parameters.get("stride")
            parts = [encoding]
            if stride is not None:
                columns = self.tokenizer([row.text], truncation=True, stride=stride, return_overflowing_tokens=True, **self.options)
                columns.pop("overflow_to_sample_mapping", None)
                parts = unzipped(columns)
            for number, part in enumerate(parts):
                rows.append(row)
                encodings.append({**part, "sentence": row.text, "part": number})
        return rows, encodings

    def _after(self, request: Request) -> dict[str, Any]:
        own = {name: value for name, value in request.parameters.items() if name != "adapter"}
        found: dict[str, Any] = self.loaded.pipeline._sanitize_parameters(**own)[2]
        return found

    def forward(self, key: Any, inputs: dict[str, torch.Tensor], lengths: list[int]) -> Sequence[Any]:
        logits = super().forward(key, inputs, lengths)
        return [row[:length] for row, length in zip(logits, lengths, strict=True)]

    def output(self, request: Request, encodings: list[Encoding], results: list[Any]) -> Any:
        texts: list[list[dict[str, Any]]] = []
        for encoding, logits in zip(encodings, results, strict=True):
            tensors: dict[str, Any] = {name: torch.tensor([encoding[name]]) for name in TOKEN_FIELDS if name in encoding}
            if not encoding["part"]:
                texts.append([])
            texts[-1].append({"offset_mapping": None, **tensors, "logits": logits[None], "sentence": encoding["sentence"]})
        return request.shaped([plain(self.loaded.pipeline.postprocess(parts, **self._after(request))) for parts in texts])


class FillMask(TextTask):
    parameters: Mapping[str, Reader] = {"top_k": read.whole(), "targets": read.labels, "truncation": read.truncation}

    def read(self, request: TaskRequest) -> Request:
        found = super().read(request)
        if "targets" in found.parameters:
            try:
                found.parameters["targets"] = self.loaded.pipeline.get_target_ids(found.parameters["targets"])
            except ValueError as error:
                raise InvalidInput(f"The parameter 'targets' names no word of the model: {error}") from None
        return found

    def encoded(self, requests: Sequence[Request]) -> tuple[list[TextRow], list[Encoding]]:
        rows, encodings = super().encoded(requests)
        mask, name = self.tokenizer.mask_token_id, self.tokenizer.mask_token
        missing = [row.request for row, each in zip(rows, encodings, strict=True) if mask not in each["input_ids"]]
        if missing:
            raise BadRows(dict.fromkeys(missing, f"The input has no {name}, which stands for the word to be found."))
        return rows, encodings

    def forward(self, key: Any, inputs: dict[str, torch.Tensor], lengths: list[int]) -> Sequence[Any]:
        """Left where they are: a number for each word that the model knows, at each token."""
        return [row[:length] for row, length in zip(self.loaded.model(**inputs).logits, lengths, strict=True)]

    def output(self, request: Request, encodings: list[Encoding], results: list[Any]) -> Any:
        after = {"top_k": min(request.parameters.get("top_k", 5), results[0].shape[-1])}
        if "targets" in request.parameters:
            after["target_ids"] = request.parameters["targets"]
        found = zip(encodings, results, strict=True)
        ids = [(torch.tensor([encoding["input_ids"]]), logits[None].float()) for encoding, logits in found]
        return request.shaped([self.loaded.pipeline.postprocess({"input_ids": each, "logits": logits}, **after) for each, logits in ids])

    def example(self) -> TaskRequest:
        return TaskRequest([f"Warm {self.tokenizer.mask_token}"], {})
