"""Tasks for embeddings, the similarity of sentences, and the ranking of texts for a query."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.huggingface.worker import requests as read
from tsx_runtime.features.huggingface.worker.loading import Loaded
from tsx_runtime.features.huggingface.worker.pooling import SentenceLayout
from tsx_runtime.features.huggingface.worker.requests import Reader
from tsx_runtime.features.huggingface.worker.tasks import Fields, Request, Unit
from tsx_runtime.features.huggingface.worker.texts import TextRow, TextTask, check_pairs
from tsx_runtime.worker.exceptions import InvalidInput

SIMILARITIES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cosine": lambda vector, rows: nn.functional.cosine_similarity(vector[None], rows),
    "dot": lambda vector, rows: rows @ vector,
    "euclidean": lambda vector, rows: -torch.linalg.vector_norm(rows - vector, dim=-1),
    "manhattan": lambda vector, rows: -(rows - vector).abs().sum(dim=-1),
}
INPUT_FIELD_PAIRS = (("source_sentence", "sentences"), ("query", "texts"))
RANKING_PARAMETERS: Mapping[str, Reader] = {
    "raw_scores": read.flag,
    "return_text": read.flag,
    "top_n": read.integer(),
    "truncate": read.flag,
}


class Sentences(TextTask):
    """The task of a model that computes the vector of a text.

    The output for texts is their vectors. For `source_sentence` and `sentences`, it is their
    similarities, and for `query` and `texts` a ranking.
    """

    fields = frozenset(name for pair in INPUT_FIELD_PAIRS for name in pair)
    parameters = {
        **RANKING_PARAMETERS,
        "dimensions": read.integer(),
        "encoding_format": read.one_of("float"),
        "normalize": read.flag,
        "prompt_name": read.string,
        "truncation": read.truncation,
    }

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.layout = SentenceLayout(loaded.directory, loaded.device)
        self.tokenizer.model_max_length = min(
            self.layout.max_tokens or 1 << 40, self.tokenizer.model_max_length
        )
        self._is_pooled = (
            loaded.task != "feature-extraction" or (loaded.directory / "modules.json").is_file()
        )

    def as_list(self, inputs: Any) -> tuple[list[Any], bool]:
        for single_field, list_field in INPUT_FIELD_PAIRS:
            if (
                isinstance(inputs, dict)
                and set(inputs) == {single_field, list_field}
                and isinstance(inputs[list_field], list)
                and inputs[list_field]
            ):
                return [inputs[single_field], *inputs[list_field]], False
        return super().as_list(inputs)

    def read(self, request: TaskRequest) -> Request:
        result = super().read(request)
        if isinstance(request.inputs, dict):
            result.parameters["kind"] = "query" if "query" in request.inputs else "source_sentence"
        name, prompts = result.parameters.get("prompt_name"), self.layout.prompts
        if name is not None and name not in prompts:
            raise InvalidInput(
                f"The model has no prompt {name!r}; it has {', '.join(prompts) or 'none'}."
            )
        return result

    def rows(self, request: Request) -> list[TextRow]:
        is_cut = request.parameters.get(
            "truncation", request.parameters.get("truncate", self._is_pooled)
        )
        prompt = self.layout.prompts.get(
            request.parameters.get("prompt_name", self.layout.default_prompt) or "", ""
        )
        texts = [prompt + text for text in request.inputs]
        return [
            TextRow(number, text.lower() if self.layout.lower else text, None, is_cut)
            for number, text in enumerate(texts)
        ]

    def key(self, request: Request) -> Hashable:
        """Return whether the vectors of a row's tokens are pooled."""
        return self._is_pooled or bool(
            {"kind", "normalize", "dimensions"} & request.parameters.keys()
        )

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        inputs = self.padded(units)
        tokens = self.model(**inputs)[0]
        if units[0].key:
            return list(self.layout.vectors(tokens, inputs["attention_mask"]).cpu())
        # As in transformers' pipeline, the output is the vectors of all tokens.
        return [
            row[None, : unit.length] for row, unit in zip(tokens.float().cpu(), units, strict=True)
        ]

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        parameters, results = request.parameters, [result for (result,) in parts]
        if "kind" in parameters:
            scores: list[float] = SIMILARITIES[self.layout.similarity](
                results[0], torch.stack(results[1:])
            ).tolist()
            return (
                scores
                if parameters["kind"] == "source_sentence"
                else rank_texts(scores, request.inputs[1:], parameters)
            )
        if parameters.keys() & {"dimensions", "normalize"}:
            vectors = torch.stack(results)[:, : parameters.get("dimensions")]
            results = list(
                nn.functional.normalize(vectors, dim=-1)
                if parameters.get("normalize", self.layout.normalizes)
                else vectors
            )
        return request.shaped([vector.tolist() for vector in results])


class TextRanking(TextTask):
    """The task of a cross-encoder, which reads the query and a text together."""

    fields = frozenset(INPUT_FIELD_PAIRS[1])
    parameters = RANKING_PARAMETERS

    def as_list(self, inputs: Any) -> tuple[list[Any], bool]:
        if (
            isinstance(inputs, dict)
            and set(inputs) == self.fields
            and isinstance(inputs["texts"], list)
            and inputs["texts"]
        ):
            return [inputs["query"], *inputs["texts"]], False
        raise InvalidInput('`inputs` must be {"query": "...", "texts": ["...", ...]}.')

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        query, *texts = super().read_inputs(inputs, parameters)
        check_pairs([query], texts)
        return [query, *texts]

    def rows(self, request: Request) -> list[TextRow]:
        query, *texts = request.inputs
        return [
            TextRow(number, query, text, request.parameters.get("truncate", True))
            for number, text in enumerate(texts, 1)
        ]

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        return list(self.model(**self.padded(units)).logits.float().cpu())

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """Return the ranking by the probability of the last label.

        With only one label, this is its sigmoid, as by default in sentence-transformers.
        """
        logits = torch.stack([result for part in parts for result in part])
        config = getattr(self.loaded.model.config, "sentence_transformers", None) or {}
        if request.parameters.get("raw_scores"):
            pass
        elif logits.shape[-1] > 1:
            logits = logits.softmax(dim=-1)
        elif not str(config.get("activation_fn", "")).endswith("Identity"):
            logits = logits.sigmoid()
        return rank_texts(logits[:, -1].tolist(), request.inputs[1:], request.parameters)

    def example(self) -> TaskRequest:
        return TaskRequest(
            {
                "query": "What is fast?",
                "texts": ["The first request is as fast as the tenth.", "Warm-up"],
            },
            {},
        )


def rank_texts(
    scores: list[float], texts: Sequence[str], parameters: Fields
) -> list[dict[str, Any]]:
    """Rank texts, the best one first, in the format of text-embeddings-inference."""
    ranking = sorted(range(len(scores)), key=lambda index: -scores[index])[
        : parameters.get("top_n")
    ]
    returns_text = parameters.get("return_text", False)
    return [
        {"index": index, "score": scores[index]} | ({"text": texts[index]} if returns_text else {})
        for index in ranking
    ]
