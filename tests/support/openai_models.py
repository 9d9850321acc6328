"""Models for OpenAI's API: a generator of known characters, and an embedder that counts letters."""

from __future__ import annotations

# A handler whose tokens are characters. The last message is `say WORDS`, and the answer is WORDS,
# repeated until `max_tokens`.
WRITER = """
import asyncio, os, random
from tsx_runtime.errors import Unavailable
from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.features.generation.worker.interface import Prompt, TextPiece, TokenLogprob
from tsx_runtime.features.openai.worker.generation import answer


class Writer:
    media = None
    context_length = 2000
    adapters = ("loud",)
    chat_template, response_template, special_tokens = "", None, ()

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids, visible_tokens=()):
        return "".join(map(chr, ids))

    def token_bytes(self, id):
        return chr(id).encode()

    def encode_chat(self, messages, tools=(), variables=None, files=()):
        if messages[0]["role"] == "assistant":
            raise InvalidInput("The chat template refuses a chat that the assistant begins.")
        shown = "".join(f"[{each['function']['name']}]" for each in tools)
        shown += "".join(f"{name}={value};" for name, value in (variables or {}).items())
        return Prompt(self.encode(shown + "\\n".join(f"{each['role']}: {each['content']}" for each in messages)))

    def stream(self, prompt, sampling, media=None):
        return self._stream(self.decode(prompt).rpartition("say ")[2], sampling)

    async def _stream(self, text, sampling):
        if sampling.grammar is not None:
            if "nonsense" in sampling.grammar.text:
                raise InvalidInput("The JSON schema cannot be used: 'nonsense' is no type.")
            text = '{"name": "weather", "arguments": {"city": "Rome"}}' if "anyOf" in sampling.grammar.text else '{"a": 1}'
            if '"array"' in sampling.grammar.text:
                text = '[' + text + ', {"name": "time", "arguments": {}}]'
        if text == "full":
            raise Unavailable("The cache has no room for this; try again.", retry_after=1)
        if sampling.adapter:
            text = text.upper()
        if sampling.temperature:
            text = "".join(random.Random(sampling.seed).choices("abcdefgh", k=len(text)))
        most = sampling.max_tokens or len(text)
        end = min([len(text), *(at for stop in sampling.stop if (at := text.find(stop)) >= 0)])
        for place, letter in enumerate(text[: min(most, end)]):
            if text.startswith("exit") and place == 4:
                os._exit(7)
            if text.startswith("break") and place == 4:
                raise RuntimeError("the engine broke")
            last = place + 1 == min(most, end)
            tops = [(ord(letter), -0.5), (ord("x"), float("-inf"))][: sampling.top_logprobs]
            finished = ("length" if most < end else "stop") if last else None
            yield TextPiece(letter, 1, finished, [TokenLogprob(ord(letter), -0.5, tops)] if sampling.logprobs else ())
            await asyncio.sleep(0)
        if not text[:end]:
            yield TextPiece("", 1, "stop")


class Handler:
    takes_raw_bodies = True

    async def initialize(self, context):
        self.model = context.model_name

    async def handle(self, data, context):
        row = data[0]
        return [await answer(context.get_request_header(0, "url_path"), row.get("body", row), Writer(), context, self.model)]
"""

# A handler whose vectors have the counts of a, b and c. The relevance of a text is the number of
# the query's letters in it; a sound is its own text.
COUNTER = """
from tsx_runtime.worker.exceptions import BadRows, InvalidInput
from tsx_runtime.features.generation.worker.interface import TaskResult
from tsx_runtime.features.openai.worker import tasks


def handle(data, context):
    if data is None:
        return None
    answers, faults = [], {}
    for idx, row in enumerate(data):
        path = context.get_request_header(idx, "url_path")
        try:
            request = tasks.read(path, row)
            result = run(request.task_request(context.model_name))
            answers.append(request.answer(result.output, result.tokens, request.model or context.model_name))
            context.set_response_content_type(idx, "application/json")
        except InvalidInput as error:
            faults[idx] = error.message
    if faults:
        raise BadRows(faults)
    return answers


def run(request):
    given = request.inputs
    if isinstance(given, bytes):
        chunks = [{"text": given.decode(), "timestamp": (0.0, 1.5)}]
        return TaskResult({"text": given.decode()} | ({"chunks": chunks} if request.parameters.get("return_timestamps") else {}))
    if isinstance(given, dict):
        return TaskResult([sum(map(text.count, set(given["query"]))) / 10 for text in given["texts"]], sum(map(len, given["texts"])))
    return TaskResult([[float(text.count(letter)) for letter in "abc"] for text in given], sum(map(len, given)))
"""
