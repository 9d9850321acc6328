"""Tasks for texts that use transformers' pipelines.

The tasks are text, zero-shot and token classification, and the prediction of masked words.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.huggingface.worker import requests as read
from tsx_runtime.features.huggingface.worker.batches import Budget
from tsx_runtime.features.huggingface.worker.loading import Loaded
from tsx_runtime.features.huggingface.worker.pipelines import PipelineTask
from tsx_runtime.features.huggingface.worker.tasks import MAX_PARTS, Fields, Request, Unit
from tsx_runtime.features.huggingface.worker.texts import (
    EXAMPLE,
    check_length,
    check_pairs,
    check_text,
    cut_long_pair,
    cut_long_text,
    require_text,
    text_cost,
)
from tsx_runtime.worker.exceptions import InvalidInput


class TextPipelineTask(PipelineTask):
    """A task for texts that uses a pipeline."""

    media = False
    max_parts = MAX_PARTS

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        # With padding on the left, positions of tokens would be shifted.
        loaded.tokenizer.padding_side = "right"
        if loaded.tokenizer.pad_token is None:
            self.budget = Budget(0, 0)  # Without padding, each row runs alone.

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        return [require_text(value) for value in inputs]

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {})

    def units_of(self, position: int, request: Request) -> list[Unit]:
        units = super().units_of(position, request._replace(inputs=self.shortened(request)))
        return [check_length(unit, self.loaded) for unit in units]

    def shortened(self, request: Request) -> list[Any]:
        """Return the part of each input that the model reads.

        Raises:
            ValueError: The input cannot be shortened.
        """
        return [cut_long_text(self.loaded, text) for text in request.inputs]

    def length(self, tensors: Fields) -> int:
        return int(tensors["input_ids"].shape[1])

    def key(self, tensors: Fields, preprocess_options: Fields) -> Hashable:
        return None

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        return [
            ({**output, "logits": output["logits"].float()}, postprocess_options)
            for output, postprocess_options in super().run(units)
        ]

    def cost(self, request: Request) -> int:
        return text_cost(self.loaded, [(text, None) for text in request.inputs])


class TextClassification(TextPipelineTask):
    """The classification of texts, or of pairs of texts."""

    parameters = {**read.FUNCTION, "truncation": read.truncation}

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        """Return texts, or pairs of texts as {"text": ..., "text_pair": ...}.

        Raises:
            InvalidInput: An input is neither a text nor such a pair.
        """
        for value in inputs:
            if isinstance(value, dict) and set(value) != {"text", "text_pair"}:
                raise InvalidInput('A pair of texts is {"text": "...", "text_pair": "..."}.')
        return [
            (
                {name: require_text(value[name], name) for name in ("text", "text_pair")}
                if isinstance(value, dict)
                else {"text": require_text(value)}
            )
            for value in inputs
        ]

    def shortened(self, request: Request) -> list[Any]:
        return [
            dict(zip(texts, cut_long_pair(self.loaded, *texts.values()), strict=False))
            for texts in request.inputs
        ]

    def options(self, request: Request) -> dict[str, Any]:
        return {"top_k": None, **super().options(request)}

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """Return a list of lists of labels, even for one text, as in the hosted API."""
        return [self.postprocessed(results) for results in parts]

    def cost(self, request: Request) -> int:
        return text_cost(
            self.loaded, [(texts["text"], texts.get("text_pair")) for texts in request.inputs]
        )


class ZeroShotClassification(TextPipelineTask):
    """The classification of texts by labels in the request."""

    parameters = {
        "candidate_labels": read.labels,
        "hypothesis_template": read.template,
        "multi_label": read.flag,
    }
    required = ("candidate_labels",)

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        if (pairs := len(inputs) * len(parameters["candidate_labels"])) > MAX_PARTS:
            raise InvalidInput(
                f"Texts times labels are {pairs}; at most {MAX_PARTS} are taken. Send several"
                " requests."
            )
        texts = super().read_inputs(inputs, parameters)
        check_pairs(texts, parameters["candidate_labels"])
        return texts

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        outputs = [self.postprocessed(results) for results in parts]
        columns = [zip(output["labels"], output["scores"], strict=True) for output in outputs]
        return request.shaped(
            [[{"label": label, "score": score} for label, score in pairs] for pairs in columns]
        )

    def cost(self, request: Request) -> int:
        labels = request.parameters["candidate_labels"]
        return text_cost(
            self.loaded, [(text, label) for text in request.inputs for label in labels]
        )

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {"candidate_labels": ["fast", "slow"]})


class TokenClassification(TextPipelineTask):
    """The classification of tokens.

    A text that is too long for the model is cut, as in transformers. With the parameter `stride`,
    it is split into overlapping parts.
    """

    parameters = {
        "aggregation_strategy": read.one_of("none", "simple", "first", "average", "max"),
        "ignore_labels": read.strings,
        "stride": read.integer(0, 1 << 20),
    }

    def units_of(self, position: int, request: Request) -> list[Unit]:
        if (stride := request.parameters.get("stride")) is not None:
            special_tokens = self.loaded.tokenizer.num_special_tokens_to_add()
            max_text_tokens = (self.loaded.max_tokens or 1 << 30) - special_tokens
            if stride > (max_stride := max_text_tokens * 9 // 10):
                raise ValueError(
                    f"`stride` is {stride}; it is at most {max_stride}, as parts that overlap more"
                    " are too many."
                )
            for text in request.inputs:
                check_text(text, max_text_tokens - stride)
        return super().units_of(position, request)

    def shortened(self, request: Request) -> list[Any]:
        return (
            list(request.inputs) if "stride" in request.parameters else super().shortened(request)
        )


class FillMask(TextPipelineTask):
    """The prediction of masked words."""

    parameters = {
        "top_k": read.integer(1, 1000),
        "targets": read.labels,
        "truncation": read.truncation,
    }

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        texts, mask = super().read_inputs(inputs, parameters), self.loaded.tokenizer.mask_token
        if not all(mask in text for text in texts):
            raise InvalidInput(f"The input has no {mask}, which stands for the word to be found.")
        if (
            requested_words := sum(text.count(mask) for text in texts) * parameters.get("top_k", 5)
        ) > MAX_PARTS:
            raise InvalidInput(
                f"This asks for {requested_words} words; the limit is {MAX_PARTS}. Send fewer"
                f" {mask} or a lower `top_k`."
            )
        return texts

    def shortened(self, request: Request) -> list[Any]:
        texts, mask = super().shortened(request), self.loaded.tokenizer.mask_token
        if not all(mask in text for text in texts):
            raise ValueError(
                f"The input has no {mask} in its first {self.loaded.max_tokens} tokens; the model"
                " takes no more. Send less."
            )
        return texts

    def options(self, request: Request) -> dict[str, Any]:
        """Return the arguments of the pipeline, with `top_k` limited by the vocabulary's size."""
        options = super().options(request)
        tokenizer_options = {"truncation": options.pop("truncation", False)}
        return {
            **options,
            "top_k": min(options.get("top_k", 5), self.loaded.model.config.vocab_size),
            "tokenizer_kwargs": tokenizer_options,
        }

    def example(self) -> TaskRequest:
        return TaskRequest([f"Warm {self.loaded.tokenizer.mask_token}"], {})
