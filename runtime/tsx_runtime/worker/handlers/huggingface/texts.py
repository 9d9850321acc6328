"""The base of tasks that read text: one call of the tokenizer for the requests of a batch, and rows of like length together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from tsx_runtime.worker.exceptions import BadRows, InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest, TaskResult
from tsx_runtime.worker.handlers.huggingface.batches import Budget, run_batched
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.tasks import BaseTask, Request, a_text

Encoding: TypeAlias = dict[str, Any]  # of one row, without padding: lists of numbers


class TextRow(NamedTuple):
    request: int  # its position in the batch
    text: str
    pair: str | None = None
    truncation: bool | str = False
    language: str | None = None  # of the text, for models that read several


class TextTask(BaseTask):
    options: Mapping[str, Any] = {}  # of the tokenizer

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.tokenizer = loaded.tokenizer
        self.tokenizer.padding_side = "right"  # positions count from the left
        pads = self.tokenizer.pad_token is not None
        self._budget = loaded.budget if pads else Budget(loaded.budget.most, 0)  # 0: rows of one length only

    def read_input(self, given: Any, parameters: dict[str, Any]) -> Any:
        return a_text(given)

    # What a task says of itself

    def rows(self, position: int, request: Request) -> list[TextRow]:
        cut = request.parameters.get("truncation", False)
        return [TextRow(position, text, None, cut) for text in request.inputs]

    def key(self, request: Request) -> Hashable:
        """Rows of requests of one key go into one call of the model."""
        return None

    def forward(self, key: Any, inputs: dict[str, torch.Tensor], lengths: list[int]) -> Sequence[Any]:
        """For each row a result; `lengths` are without padding."""
        return list(self.loaded.model(**inputs).logits.float().cpu())

    def output(self, request: Request, encodings: list[Encoding], results: list[Any]) -> Any:
        """The answer, of what the request's rows gave."""
        raise NotImplementedError

    def example(self) -> TaskRequest:
        return TaskRequest(["Warm-up", "The first request is as fast as the tenth."], {})

    # The batch

    def answer(self, requests: Sequence[Request]) -> list[TaskResult]:
        rows, encodings = self.encoded(requests)
        lengths = [len(each["input_ids"]) for each in encodings]
        own_keys = [(request.adapter, self.key(request)) for request in requests]
        keys = [own_keys[row.request] for row in rows]

        def run(positions: list[int]) -> Sequence[Any]:
            adapter, key = keys[positions[0]]
            self.loaded.adapters.apply(adapter)
            some = [encodings[position] for position in positions]
            return self.forward(key, self._padded(some), [lengths[position] for position in positions])

        results = run_batched(lengths, keys, self._budget, run)
        own: list[tuple[list[Encoding], list[Any]]] = [([], []) for _ in requests]
        for row, encoding, result in zip(rows, encodings, results, strict=True):
            own[row.request][0].append(encoding)
            own[row.request][1].append(result)
        return [
            TaskResult(self.output(request, *each), sum(len(encoding["input_ids"]) for encoding in each[0]))
            for request, each in zip(requests, own, strict=True)
        ]

    def encoded(self, requests: Sequence[Request]) -> tuple[list[TextRow], list[Encoding]]:
        """Raises BadRows for requests that are longer than the model takes, where they are not to be cut."""
        rows = [row for position, request in enumerate(requests) for row in self.rows(position, request)]
        encodings: list[Encoding] = [{}] * len(rows)
        kinds = [(row.pair is None, row.truncation, row.language) for row in rows]
        for kind in dict.fromkeys(kinds):
            chosen = [idx for idx, each in enumerate(kinds) if each == kind]
            for idx, encoding in zip(chosen, self._tokenized([rows[idx] for idx in chosen], *kind), strict=True):
                encodings[idx] = encoding
        most = self.loaded.most_tokens
        sizes = [(row.request, len(each["input_ids"])) for row, each in zip(rows, encodings, strict=True)]
        how = f"the model takes at most {most}. Send less, or have it cut by the parameter `truncation`: true, where the task has it."
        faults = {position: f"The input has {size} tokens; {how}" for position, size in sizes if most is not None and size > most}
        if faults:
            raise BadRows(faults)
        return rows, encodings

    def _tokenized(self, rows: list[TextRow], single: bool, truncation: bool | str, language: str | None) -> list[Encoding]:
        before = getattr(self.tokenizer, "src_lang", None)
        if language is not None:
            self.tokenizer.src_lang = language
        pairs = None if single else [row.pair for row in rows]
        try:
            columns = self.tokenizer([row.text for row in rows], pairs, truncation=truncation, verbose=False, **self.options)
        except Exception as error:  # the class that tokenizers raises
            if "Truncation error" not in str(error):
                raise
            raise InvalidInput(f"The input is too long, and cannot be cut as wanted: {error}") from error
        finally:
            if language is not None:
                self.tokenizer.src_lang = before
        return unzipped(columns)

    def _padded(self, encodings: Sequence[Encoding]) -> dict[str, torch.Tensor]:
        longest = max(len(each["input_ids"]) for each in encodings)
        fills = {"input_ids": self.tokenizer.pad_token_id or 0, "token_type_ids": self.tokenizer.pad_token_type_id}
        inputs = {}
        for name in self.tokenizer.model_input_names:
            if name in encodings[0]:
                fill = [fills.get(name, 0)]
                inputs[name] = torch.tensor([each[name] + fill * (longest - len(each[name])) for each in encodings]).to(self.loaded.device)
        return inputs

    def cost(self, request: Request) -> int:
        """Of a row no more than the model reads of it."""
        most = self.loaded.most_tokens or 1 << 40
        return sum(min(len(self.tokenizer(row.text, row.pair, verbose=False)["input_ids"]), most) for row in self.rows(0, request))


def unzipped(columns: Mapping[str, list[Any]]) -> list[Encoding]:
    """The rows of what the tokenizer gives."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
