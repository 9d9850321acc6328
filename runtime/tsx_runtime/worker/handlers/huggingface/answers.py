"""Question answering: the part of a text that answers a question, found by the most likely first
and last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.tasks import Fields, Request, Task, Unit
from tsx_runtime.worker.handlers.huggingface.texts import TextRow, TextTask, a_text, check_text

Span: TypeAlias = tuple[int, int]  # of characters of the context


class QuestionAnswering(TextTask):
    """A context that is longer than the model takes is read in overlapping parts.

    Parameters and defaults are those of Hugging Face.
    """

    fields = frozenset({"question", "context"})
    parameters = {
        "align_to_words": read.flag,
        "doc_stride": read.whole(0, 1 << 20),
        "handle_impossible_answer": read.flag,
        "max_answer_len": read.whole(1, 10_000),
        "max_question_len": read.whole(1, 10_000),
        "max_seq_len": read.whole(8, 1 << 20),
        "top_k": read.whole(1, 1000),
    }

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        if not all(isinstance(each, dict) and set(each) == self.fields for each in inputs):
            raise InvalidInput('`inputs` must be {"question": "...", "context": "..."}.')
        return [
            (a_text(each["question"], "question"), a_text(each["context"], "context"))
            for each in inputs
        ]

    def rows(self, request: Request) -> list[TextRow]:
        return [
            TextRow(number, question, context)
            for number, (question, context) in enumerate(request.inputs)
        ]

    units = Task.units  # and not the tokenizer's one call for all requests

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
        most = min(parameters.get("max_seq_len", 384), self.loaded.most_tokens or 1 << 20)
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
        found = self.model(**self.padded(units))
        logits = torch.stack((found.start_logits, found.end_logits), dim=-1).float().cpu()
        return [
            _best(unit.tensors, row[: unit.length], unit.options)
            for unit, row in zip(units, logits, strict=True)
        ]

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """The same answer in several parts, or by several tokens of its words, counts once, with
        the sum of their probabilities.
        """
        most, outputs = request.parameters.get("top_k", 1), []
        for (_, context), found in zip(request.inputs, parts, strict=True):
            scores: dict[Span, float] = {}
            for place, score in (each for _, spans in found for each in spans):
                scores[place] = scores.get(place, 0.0) + score
            if request.parameters.get("handle_impossible_answer") or not scores:
                scores[0, 0] = min(none for none, _ in found)
            best = sorted(scores.items(), key=lambda each: -each[1])[:most]
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
    """The probability of no answer, for which the first token stands, and answers: where they are
    in the context, and how likely.
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
    scores, places = pairs.topk(min(parameters.get("top_k", 1), len(pairs)))
    found = []
    for score, place in zip(scores.tolist(), places.tolist(), strict=True):
        first, last = divmod(place, len(start))
        if score > 0.0:
            if parameters.get("align_to_words", True):
                words = [*zip(part["sequences"], part["words"], strict=True)]
                first = words.index(words[first])  # the tokens of a word stand together
                last = len(words) - 1 - words[::-1].index(words[last])
            found.append(
                ((part["offset_mapping"][first][0], part["offset_mapping"][last][1]), score)
            )
    return float(start[0] * end[0]), found
