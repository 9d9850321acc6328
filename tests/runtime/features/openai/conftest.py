"""Tiny models that write a given answer, and a client of their API without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.language_models import scripted_model
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.openai.worker.generation import answer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
HEAD = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}"
)
TAIL = "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
HERMES = HEAD + "<tool_call>\n{{ call.function | tojson }}\n</tool_call>" + TAIL
THINKING = TAIL.replace("<|assistant|>", "<|assistant|><think>")
REASONER = (
    HEAD.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif"
        " %}{{ message.content }}",
    )
    + "<tool_call>{{ call.function | tojson }}</tool_call>"
    + THINKING
)
CITY = '{"city": "Rome"}'
TAGS = {"<tool_call>": False, "</tool_call>": False}


class Client:
    """A client of `answer` without a server. `send_piece` is that of a worker's context."""

    def __init__(self, generator: TextGenerator, run: Callable[[Any], Any]) -> None:
        self.generator, self._run = generator, run
        self.pieces: list[bytes] = []
        self.status = 200

    def post(self, body: Mapping[str, Any], path: str = "v1/chat/completions") -> Any:
        self.pieces = []
        context: Any = SimpleNamespace(
            send_piece=lambda _, piece: self.pieces.append(piece),
            set_response_content_type=lambda *_: None,
            set_response_status=lambda *_: None,
            get_request_header=lambda *_: None,
        )
        return self._run(answer(path, body, self.generator, context, "m"))

    def chat(self, text: str = "?", **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.post({"messages": messages, "tools": [WEATHER]} | fields)

    def stream(self, **fields: Any) -> list[Any]:
        """Return the choices of all chunks."""
        *chunks, _ = self.events(self.chat(stream=True, **fields))
        return [json.loads(chunk)["choices"][0] for chunk in chunks]

    def events(self, last_piece: bytes) -> list[str]:
        """Return the data of all events."""
        lines = b"".join([*self.pieces, last_piece]).decode().split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 60))
    loop.close()


@pytest.fixture
def start(tmp_path: Path, run: Any) -> Iterator[Callable[..., Client]]:
    engines = []

    def start_model(*model: Any, response_template: Any = None) -> Client:
        # These imports take seconds.
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from tsx_runtime.features.generation.worker.engines.transformers_engine import (
            TransformersEngine,
        )

        directory = scripted_model(tmp_path / "model", *model)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.response_template = response_template
        engine = TransformersEngine(
            AutoModelForCausalLM.from_pretrained(directory),
            {},
            HuggingFaceConfig(),
            [tokenizer.eos_token_id],
        )
        run(engine.start())
        engines.append(engine)
        metrics: Any = SimpleNamespace(
            engine_reported_at=1e12, report=lambda *_: None, report_engine=lambda *_: None
        )
        return Client(TextGenerator(tokenizer, engine, None, len(tokenizer), metrics), run)

    yield start_model
    for engine in engines:
        run(engine.close())
