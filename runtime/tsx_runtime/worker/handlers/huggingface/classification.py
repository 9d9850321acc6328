"""Labels of texts, by transformers' own pipelines: text classification, zero-shot and token
classification, masked words.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.batches import Budget
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.pipelines import PipelineTask
from tsx_runtime.worker.handlers.huggingface.tasks import MOST_PARTS, Fields, Request, Unit
from tsx_runtime.worker.handlers.huggingface.texts import (
    EXAMPLE,
    a_text,
    beginning,
    check_length,
    check_pairs,
    check_text,
    shortened,
    text_cost,
)


class TextPipelineTask(PipelineTask):
    media = False
    most_parts = MOST_PARTS

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        loaded.tokenizer.padding_side = "right"  # positions count from the left
        if loaded.tokenizer.pad_token is None:
            self.budget = Budget(0, 0)  # each row alone

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        return [a_text(each) for each in inputs]

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {})

    def units_of(self, position: int, request: Request) -> list[Unit]:
        units = super().units_of(position, request._replace(inputs=self.shortened(request)))
        return [check_length(unit, self.loaded) for unit in units]

    def shortened(self, request: Request) -> list[Any]:
        """The inputs, with as much of each as the model reads. Raises ValueError."""
        return [beginning(self.loaded, text) for text in request.inputs]

    def length(self, tensors: Fields) -> int:
        return int(tensors["input_ids"].shape[1])

    def key(self, tensors: Fields, before: Fields) -> Hashable:
        return None

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        return [
            ({**output, "logits": output["logits"].float()}, after)
            for output, after in super().run(units)
        ]

    def cost(self, request: Request) -> int:
        return text_cost(self.loaded, [(text, None) for text in request.inputs])


class TextClassification(TextPipelineTask):
    parameters = {**read.FUNCTION, "truncation": read.truncation}

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        """Texts, and pairs of texts as {"text": ..., "text_pair": ...}."""
        for each in inputs:
            if isinstance(each, dict) and set(each) != {"text", "text_pair"}:
                raise InvalidInput('A pair of texts is {"text": "...", "text_pair": "..."}.')
        return [
            (
                {name: a_text(each[name], name) for name in ("text", "text_pair")}
                if isinstance(each, dict)
                else {"text": a_text(each)}
            )
            for each in inputs
        ]

    def shortened(self, request: Request) -> list[Any]:
        return [
            dict(zip(each, shortened(self.loaded, *each.values()), strict=False))
            for each in request.inputs
        ]

    def options(self, request: Request) -> dict[str, Any]:
        return {"top_k": None, **super().options(request)}

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """A list of labels in a list also for one text: that is the API's shape."""
        return [self.postprocessed(each) for each in parts]

    def cost(self, request: Request) -> int:
        return text_cost(
            self.loaded, [(each["text"], each.get("text_pair")) for each in request.inputs]
        )


class ZeroShotClassification(TextPipelineTask):
    parameters = {
        "candidate_labels": read.labels,
        "hypothesis_template": read.template,
        "multi_label": read.flag,
    }
    required = ("candidate_labels",)

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        if (pairs := len(inputs) * len(parameters["candidate_labels"])) > MOST_PARTS:
            raise InvalidInput(
                f"Texts times labels are {pairs}; at most {MOST_PARTS} are taken. Send several"
                " requests."
            )
        texts = super().read_inputs(inputs, parameters)
        check_pairs(texts, parameters["candidate_labels"])
        return texts

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        found = [self.postprocessed(each) for each in parts]
        pairs = [zip(each["labels"], each["scores"], strict=True) for each in found]
        return request.shaped(
            [[{"label": label, "score": score} for label, score in each] for each in pairs]
        )

    def cost(self, request: Request) -> int:
        labels = request.parameters["candidate_labels"]
        return text_cost(
            self.loaded, [(text, label) for text in request.inputs for label in labels]
        )

    def example(self) -> TaskRequest:
        return TaskRequest(EXAMPLE, {"candidate_labels": ["fast", "slow"]})


class TokenClassification(TextPipelineTask):
    """A text that is longer than the model takes is cut, as transformers does, or read in
    overlapping parts where `stride` says so.
    """

    parameters = {
        "aggregation_strategy": read.one_of("none", "simple", "first", "average", "max"),
        "ignore_labels": read.strings,
        "stride": read.whole(0, 1 << 20),
    }

    def units_of(self, position: int, request: Request) -> list[Unit]:
        if (stride := request.parameters.get("stride")) is not None:
            special = self.loaded.tokenizer.num_special_tokens_to_add()
            room = (self.loaded.most_tokens or 1 << 30) - special
            if stride > (most := room * 9 // 10):
                raise ValueError(
                    f"`stride` is {stride}; it is at most {most}, as parts that overlap more are"
                    " too many."
                )
            for text in request.inputs:
                check_text(text, room - stride)
        return super().units_of(position, request)

    def shortened(self, request: Request) -> list[Any]:
        return (
            list(request.inputs) if "stride" in request.parameters else super().shortened(request)
        )


class FillMask(TextPipelineTask):
    parameters = {
        "top_k": read.whole(1, 1000),
        "targets": read.labels,
        "truncation": read.truncation,
    }

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        texts, mask = super().read_inputs(inputs, parameters), self.loaded.tokenizer.mask_token
        if not all(mask in text for text in texts):
            raise InvalidInput(f"The input has no {mask}, which stands for the word to be found.")
        if (
            wanted := sum(text.count(mask) for text in texts) * parameters.get("top_k", 5)
        ) > MOST_PARTS:
            raise InvalidInput(
                f"That are {wanted} words to propose; at most {MOST_PARTS} are. Send fewer {mask}"
                " or a lower `top_k`."
            )
        return texts

    def shortened(self, request: Request) -> list[Any]:
        texts, mask = super().shortened(request), self.loaded.tokenizer.mask_token
        if not all(mask in text for text in texts):
            raise ValueError(
                f"The input has no {mask} in its first {self.loaded.most_tokens} tokens; the model"
                " takes no more. Send less."
            )
        return texts

    def options(self, request: Request) -> dict[str, Any]:
        """The number of words that the model knows bounds `top_k`."""
        options = super().options(request)
        cut = {"truncation": options.pop("truncation", False)}
        return {
            **options,
            "top_k": min(options.get("top_k", 5), self.loaded.model.config.vocab_size),
            "tokenizer_kwargs": cut,
        }

    def example(self) -> TaskRequest:
        return TaskRequest([f"Warm {self.loaded.tokenizer.mask_token}"], {})
