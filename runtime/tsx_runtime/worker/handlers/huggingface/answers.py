"""Question answering: the part of a text that answers a question, found by the most likely first and last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tsx_runtime.worker.exceptions import BadRows, InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.requests import Reader
from tsx_runtime.worker.handlers.huggingface.tasks import Request, a_text
from tsx_runtime.worker.handlers.huggingface.texts import Encoding, TextRow, TextTask


class QuestionAnswering(TextTask):
    """A context that is longer than the model takes is read in overlapping parts. Parameters and defaults are those of Hugging Face."""

    fields = frozenset({"question", "context"})
    parameters: Mapping[str, Reader] = {
        "align_to_words": read.flag,
        "doc_stride": read.whole(0, 1 << 20),
        "handle_impossible_answer": read.flag,
        "max_answer_len": read.whole(1, 10_000),
        "max_question_len": read.whole(1, 10_000),
        "max_seq_len": read.whole(8, 1 << 20),
        "top_k": read.whole(1, 1000),
    }

    def read_input(self, given: Any, parameters: dict[str, Any]) -> tuple[str, str]:
        if not isinstance(given, dict) or set(given) != self.fields:
            raise InvalidInput('`inputs` must be {"question": "...", "context": "..."}.')
        return a_text(given["question"], "question"), a_text(given["context"], "context")

    def rows(self, position: int, request: Request) -> list[TextRow]:
        return [TextRow(position, question, context) for question, context in request.inputs]

    def encoded(self, requests: Sequence[Request]) -> tuple[list[TextRow], list[Encoding]]:
        rows, encodings, faults = list[TextRow](), list[Encoding](), dict[int, str]()
        for position, request in enumerate(requests):
            for number, row in enumerate(self.rows(position, request)):
                try:
                    parts = self._parts(row, request.parameters)
                except ValueError as error:
                    faults[position] = str(error)
                    break
                rows += [row] * len(parts)
                encodings += [{**part, "input": number} for part in parts]
        if faults:
            raise BadRows(faults)
        return rows, encodings

    def _parts(self, row: TextRow, parameters: dict[str, Any]) -> list[Encoding]:
        most = min(parameters.get("max_seq_len", 384), self.loaded.most_tokens or 1 << 20)
        cut = {"truncation": True, "max_length": min(parameters.get("max_question_len", 64), most // 2), "return_offsets_mapping": True}
        offsets = self.tokenizer(row.text, add_special_tokens=False, **cut)["offset_mapping"]
        room = most - len(offsets) - self.tokenizer.num_special_tokens_to_add(pair=True)
        stride = parameters.get("doc_stride", min(most // 2, 128, room * 9 // 10))
        if not 0 <= stride <= room * 9 // 10 < room:
            raise ValueError(f"`doc_stride` is {stride}, but a part has room for {room} tokens of the context: it is at most 0.9 of them.")
        question = row.text[: offsets[-1][1]] if offsets else row.text
        split = {"truncation": "only_second", "max_length": most, "stride": stride, "return_overflowing_tokens": True}
        found = self.tokenizer([question], [row.pair], return_offsets_mapping=True, **split)
        names = [name for name in found if name != "overflow_to_sample_mapping"]
        return [
            {name: found[name][number] for name in names} | {"sequences": found.sequence_ids(number), "words": found.word_ids(number)}
            for number in range(len(found["input_ids"]))
        ]

    def forward(self, key: Any, inputs: dict[str, torch.Tensor], lengths: list[int]) -> Sequence[Any]:
        found = self.loaded.model(**inputs)
        logits = torch.stack((found.start_logits, found.end_logits), dim=-1).float().cpu()
        return [row[:length] for row, length in zip(logits, lengths, strict=True)]

    def output(self, request: Request, encodings: list[Encoding], results: list[Any]) -> Any:
        """The same answer in several parts, or by several tokens of its words, counts once, with the sum of their probabilities."""
        spans: list[dict[tuple[int, int], float]] = [{} for _ in request.inputs]
        nothing = [1.0] * len(spans)
        for part, logits in zip(encodings, results, strict=True):
            at = part["input"]
            none, found = _best(part, logits, request.parameters)
            nothing[at] = min(nothing[at], none)
            for place, score in found:
                spans[at][place] = spans[at].get(place, 0.0) + score
        most, outputs = request.parameters.get("top_k", 1), []
        for (_, context), scores, none in zip(request.inputs, spans, nothing, strict=True):
            if request.parameters.get("handle_impossible_answer") or not scores:
                scores[0, 0] = none
            best = sorted(scores.items(), key=lambda each: -each[1])[:most]
            answers = [{"score": score, "start": start, "end": end, "answer": context[start:end]} for (start, end), score in best]
            outputs.append(answers[0] if most == 1 else answers)
        return request.shaped(outputs)

    def example(self) -> TaskRequest:
        return TaskRequest({"question": "Which?", "context": "The first request is as fast as the tenth."}, {})


def _best(part: Encoding, logits: torch.Tensor, parameters: dict[str, Any]) -> tuple[float, list[tuple[tuple[int, int], float]]]:
    """The probability of no answer, for which the first token stands, and answers: where they are in the context, and how likely."""
    context = torch.tensor([sequence == 1 for sequence in part["sequences"]])
    candidates = context.clone()
    candidates[0] = True
    start, end = logits.masked_fill(~candidates[:, None], float("-inf")).softmax(dim=0).unbind(dim=1)
    none = float(start[0] * end[0])
    pairs = torch.outer(start * context, end * context).triu().tril(parameters.get("max_answer_len", 15) - 1).flatten()
    scores, places = pairs.topk(min(parameters.get("top_k", 1), len(pairs)))
    found = []
    for score, place in zip(scores.tolist(), places.tolist(), strict=True):
        first, last = divmod(place, len(start))
        if score > 0.0:
            if parameters.get("align_to_words", True):
                first, last = _to_whole_words(part, first, last)
            found.append(((part["offset_mapping"][first][0], part["offset_mapping"][last][1]), score))
    return none, found


def _to_whole_words(part: Encoding, first: int, last: int) -> tuple[int, int]:
    words = list(zip(part["sequences"], part["words"], strict=True))
    while first > 0 and words[first - 1] == words[first]:
        first -= 1
    while last + 1 < len(words) and words[last + 1] == words[last]:
        last += 1
    return first, last
