"""`/v1/completions`. https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tsx_runtime.worker.generation.interface import TextGenerator, TextPiece, TokenLogprob
from tsx_runtime.worker.openai.errors import RefusedField
from tsx_runtime.worker.openai.fields import Fields
from tsx_runtime.worker.openai.sampling import MOST_CHOICES, MOST_LOGPROBS, MOST_TOKENS, read_sampling, read_schema
from tsx_runtime.worker.openai.streams import ChoicesReply, finite

USUAL_TOKENS = 16  # of an answer whose request names no number, as OpenAI has it
MOST_PROMPTS = 64
MOST_TOGETHER = 128  # choices of all prompts


class CompletionReply(ChoicesReply):
    def __init__(self, fields: Fields, generator: TextGenerator, model: str) -> None:
        """Raises InvalidInput."""
        prompts = _prompts(fields, generator)
        n = fields.whole("n", 1, MOST_CHOICES) or 1
        if n * len(prompts) > MOST_TOGETHER:
            raise RefusedField(f"{len(prompts)} prompts with n = {n} are more than {MOST_TOGETHER} texts. Send several requests.", "n")
        sampling = read_sampling(fields, generator, model, fields.whole("max_tokens", 1, MOST_TOKENS) or USUAL_TOKENS)
        top = fields.whole("logprobs", 0, MOST_LOGPROBS)
        schema = read_schema(fields.object("response_format"), "response_format", nested=True)
        sampling = replace(sampling, logprobs=top is not None, top_logprobs=top or 0, json_schema=schema)
        echo = fields.flag("echo")
        if echo and top is not None:
            raise RefusedField("The fields 'echo' and 'logprobs' do not go together here: prompts have no logprobs.", "echo")
        super().__init__(fields, generator, model, "cmpl", prompts, sampling, n)
        self._head["object"] = "text_completion"
        self._echo = [generator.decode(each.prompt) if echo else "" for each in self.continuations]
        self._offsets = [0] * len(self._choices)  # characters before the next token

    def add(self, index: int, piece: TextPiece) -> bytes:
        self._choices[index].add(piece)
        if not self.streams:
            return b""
        text, self._echo[index] = self._echo[index] + piece.text, ""
        if not text and not piece.finished and not piece.logprobs:
            return b""
        return self._chunk(self._shown(index, text, piece.logprobs, piece.finished))

    def whole(self) -> dict[str, Any]:
        choices = [
            self._shown(idx, self._echo[idx] + choice.text, choice.logprobs, choice.finished) for idx, choice in enumerate(self._choices)
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _shown(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finished: str | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": self._logprobs(index, logprobs), "finish_reason": finished}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        decode = self._generator.decode
        tokens = [decode([each.token_id]) for each in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        tops = [{decode([other]): finite(logprob) for other, logprob in each.top} for each in logprobs]
        values = [finite(each.logprob) for each in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _prompts(fields: Fields, generator: TextGenerator) -> list[list[int]]:
    """A string, a list of strings, the tokens of one prompt, or of several."""
    given = fields.take("prompt")
    several = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if not given or len(several) > MOST_PROMPTS:
        raise fields.wrong("prompt", given, f"a text, tokens, or a list of up to {MOST_PROMPTS} of one of them")
    prompts = []
    for each in several:
        tokens = generator.encode(each) if isinstance(each, str) else each
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) and 0 <= token < MOST_TOKENS for token in tokens):
            raise fields.wrong("prompt", each, "a text that is not empty, or a list of tokens")
        prompts.append(tokens)
    return prompts
