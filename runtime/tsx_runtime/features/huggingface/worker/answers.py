"""Question answering, which finds the span of a text that answers a question.

The answer is the span with the most probable first and last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.huggingface.worker import requests as read
from tsx_runtime.features.huggingface.worker.tasks import Fields, Request, Task, Unit
from tsx_runtime.features.huggingface.worker.texts import (
    TextRow,
    TextTask,
    check_text,
    require_text,
)
from tsx_runtime.worker.exceptions import InvalidInput

Span: TypeAlias = tuple[int, int]  # the first character of an answer in the context, and its end


class QuestionAnswering(TextTask):
    """The task of question answering, with the parameters and defaults of Hugging Face.

    A context that is too long for the model is split into overlapping parts.
    """

    fields = frozenset({"question", "context"})
    parameters = {
        "align_to_words": read.flag,
        "doc_stride": read.integer(0, 1 << 20),
        "handle_impossible_answer": read.flag,
        "max_answer_len": read.integer(1, 10_000),
        "max_question_len": read.integer(1, 10_000),
        "max_seq_len": read.integer(8, 1 << 20),
        "top_k": read.integer(1, 1000),
    }

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        if not all(isinstance(value, dict) and set(value) == self.fields for value in inputs):
            raise InvalidInput('`inputs` must be {"question": "...", "context": "..."}.')
        return [
            (require_text(value["question"], "question"), require_text(value["context"], "context"))
            for value in inputs
        ]

    def rows(self, request: Request) -> list[TextRow]:
        return [
            TextRow(number, question, context)
            for number, (question, context) in enumerate(request.inputs)
        ]

    units = Task.units  # Each context is tokenized separately, as it may be split.

    def units_of(self, position: int, request: Request) -> list[Unit]:
        units: list[Unit] = []
        for number, (question, context) in enumerate(request.inputs):
            units += (
                Unit(position, number, part, len(part["input_ids"]), None, request.parameters)
                for part in self._parts(question, context, request.parameters)
            )
            self.check_parts(len(units))
        return units

    def _parts(self, question: str, context: str, parameters: Fields) -> list[dict[str, Any]]:
        max_tokens = min(parameters.get("max_seq_len", 384), self.loaded.max_tokens or 1 << 20)
        question_options = {
            "truncation": True,
            "max_length": min(parameters.get("max_question_len", 64), max_tokens // 2),
            "return_offsets_mapping": True,
        }
        offsets = self.tokenizer(question, add_special_tokens=False, **question_options)[
            "offset_mapping"
        ]
        context_tokens = (
            max_tokens - len(offsets) - self.tokenizer.num_special_tokens_to_add(pair=True)
        )
        stride = parameters.get("doc_stride", min(max_tokens // 2, 128, context_tokens * 9 // 10))
        if not 0 <= stride <= context_tokens * 9 // 10 < context_tokens:
            raise ValueError(
                f"`doc_stride` is {stride}, but a part has room for {context_tokens} tokens of the"
                " context: it is at most 0.9 of them."
            )
        check_text(context, context_tokens - stride)
        question = question[: offsets[-1][1]] if offsets else question
        split_options = {
            "truncation": "only_second",
            "max_length": max_tokens,
            "stride": stride,
            "return_overflowing_tokens": True,
        }
        parts = self.tokenizer([question], [context], return_offsets_mapping=True, **split_options)
        return [
            {name: parts[name][number] for name in parts}
            | {"sequences": parts.sequence_ids(number), "words": parts.word_ids(number)}
            for number in range(len(parts["input_ids"]))
        ]

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        output = self.model(**self.padded(units))
        logits = torch.stack((output.start_logits, output.end_logits), dim=-1).float().cpu()
        return [
            _find_answers(unit.tensors, row[: unit.length], unit.options)
            for unit, row in zip(units, logits, strict=True)
        ]

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """Return the most probable answers.

        If an answer is found in several parts, or by several tokens of the same words, its
        probabilities are added.
        """
        top_k, outputs = request.parameters.get("top_k", 1), []
        for (_, context), results in zip(request.inputs, parts, strict=True):
            scores: dict[Span, float] = {}
            for span, score in (item for _, spans in results for item in spans):
                scores[span] = scores.get(span, 0.0) + score
            if request.parameters.get("handle_impossible_answer") or not scores:
                scores[0, 0] = min(no_answer_score for no_answer_score, _ in results)
            best = sorted(scores.items(), key=lambda item: -item[1])[:top_k]
            answers = [
                {"score": score, "start": start, "end": end, "answer": context[start:end]}
                for (start, end), score in best
            ]
            outputs.append(answers[0] if top_k == 1 else answers)
        return request.shaped(outputs)

    def example(self) -> TaskRequest:
        return TaskRequest(
            {"question": "Which?", "context": "The first request is as fast as the tenth."}, {}
        )


def _find_answers(
    part: Fields, logits: torch.Tensor, parameters: Fields
) -> tuple[float, list[tuple[Span, float]]]:
    """Return the probability of no answer, and the answers with their probabilities.

    The first token means no answer.
    """
    context_mask = torch.tensor([sequence == 1 for sequence in part["sequences"]])
    candidate_mask = context_mask.clone()
    candidate_mask[0] = True
    start, end = (
        logits.masked_fill(~candidate_mask[:, None], float("-inf")).softmax(dim=0).unbind(dim=1)
    )
    span_scores = (
        torch.outer(start * context_mask, end * context_mask)
        .triu()
        .tril(parameters.get("max_answer_len", 15) - 1)
        .flatten()
    )
    scores, indices = span_scores.topk(min(parameters.get("top_k", 1), len(span_scores)))
    answers = []
    for score, index in zip(scores.tolist(), indices.tolist(), strict=True):
        first_token, last_token = divmod(index, len(start))
        if score > 0.0:
            if parameters.get("align_to_words", True):
                # The answer is extended to whole words, whose tokens are adjacent.
                word_keys = [*zip(part["sequences"], part["words"], strict=True)]
                first_token = word_keys.index(word_keys[first_token])
                last_token = len(word_keys) - 1 - word_keys[::-1].index(word_keys[last_token])
            answers.append(
                (
                    (part["offset_mapping"][first_token][0], part["offset_mapping"][last_token][1]),
                    score,
                )
            )
    return float(start[0] * end[0]), answers
