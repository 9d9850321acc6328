"""Question answering: the part of a text that answers a question.

It is found by the likeliest first and last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.tasks import Fields, Request, Task, Unit
from tsx_runtime.worker.handlers.huggingface.texts import TextRow, TextTask, as_text, check_text

Span: TypeAlias = tuple[int, int]  # the first character and the end, in the context


class QuestionAnswering(TextTask):
    """The task of question answering, with the parameters and defaults of Hugging Face.

    A context that is too long for the model is read in overlapping parts.
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
            (as_text(value["question"], "question"), as_text(value["context"], "context"))
            for value in inputs
        ]

    def rows(self, request: Request) -> list[TextRow]:
        return [
            TextRow(number, question, context)
            for number, (question, context) in enumerate(request.inputs)
        ]

    units = Task.units  # Each context is tokenized alone.

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
        most = min(parameters.get("max_seq_len", 384), self.loaded.max_tokens or 1 << 20)
        cut = {
            "truncation": True,
            "max_length": min(parameters.get("max_question_len", 64), most // 2),
            "return_offsets_mapping": True,
        }
        offsets = self.tokenizer(question, add_special_tokens=False, **cut)["offset_mapping"]
        room = most - len(offsets) - self.tokenizer.num_special_tokens_to_add(pair=True)
        stride = parameters.get("doc_stride", min(most // 2, 128, room * 9 // 10))
        if not 0 <= stride <= room * 9 // 10 < room:
            raise ValueError(
                f"`doc_stride` is {stride}, but a part has room for {room} tokens of the context:"
                " it is at most 0.9 of them."
            )
        check_text(context, room - stride)
        question = question[: offsets[-1][1]] if offsets else question
        split = {
            "truncation": "only_second",
            "max_length": most,
            "stride": stride,
            "return_overflowing_tokens": True,
        }
        parts = self.tokenizer([question], [context], return_offsets_mapping=True, **split)
        return [
            {name: parts[name][number] for name in parts}
            | {"sequences": parts.sequence_ids(number), "words": parts.word_ids(number)}
            for number in range(len(parts["input_ids"]))
        ]

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        output = self.model(**self.padded(units))
        logits = torch.stack((output.start_logits, output.end_logits), dim=-1).float().cpu()
        return [
            _best(unit.tensors, row[: unit.length], unit.options)
            for unit, row in zip(units, logits, strict=True)
        ]

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """Return the likeliest answers.

        The probabilities of an answer that occurs in several parts, or by several tokens of its
        words, are added.
        """
        most, outputs = request.parameters.get("top_k", 1), []
        for (_, context), results in zip(request.inputs, parts, strict=True):
            scores: dict[Span, float] = {}
            for span, score in (item for _, spans in results for item in spans):
                scores[span] = scores.get(span, 0.0) + score
            if request.parameters.get("handle_impossible_answer") or not scores:
                scores[0, 0] = min(none for none, _ in results)
            best = sorted(scores.items(), key=lambda item: -item[1])[:most]
            answers = [
                {"score": score, "start": start, "end": end, "answer": context[start:end]}
                for (start, end), score in best
            ]
            outputs.append(answers[0] if most == 1 else answers)
        return request.shaped(outputs)

    def example(self) -> TaskRequest:
        return TaskRequest(
            {"question": "Which?", "context": "The first request is as fast as the tenth."}, {}
        )


def _best(
    part: Fields, logits: torch.Tensor, parameters: Fields
) -> tuple[float, list[tuple[Span, float]]]:
    """Return the probability of no answer, and the answers in the context with theirs.

    The first token stands for no answer.
    """
    context = torch.tensor([sequence == 1 for sequence in part["sequences"]])
    candidates = context.clone()
    candidates[0] = True
    start, end = (
        logits.masked_fill(~candidates[:, None], float("-inf")).softmax(dim=0).unbind(dim=1)
    )
    pairs = (
        torch.outer(start * context, end * context)
        .triu()
        .tril(parameters.get("max_answer_len", 15) - 1)
        .flatten()
    )
    scores, indices = pairs.topk(min(parameters.get("top_k", 1), len(pairs)))
    answers = []
    for score, index in zip(scores.tolist(), indices.tolist(), strict=True):
        first, last = divmod(index, len(start))
        if score > 0.0:
            if parameters.get("align_to_words", True):
                # The tokens of a word are adjacent.
                word_keys = [*zip(part["sequences"], part["words"], strict=True)]
                first = word_keys.index(word_keys[first])
                last = len(word_keys) - 1 - word_keys[::-1].index(word_keys[last])
            answers.append(
                ((part["offset_mapping"][first][0], part["offset_mapping"][last][1]), score)
            )
    return float(start[0] * end[0]), answers
