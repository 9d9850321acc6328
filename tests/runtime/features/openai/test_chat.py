"""Chats with tools and reasoning, with tiny models that write a given answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.language_models import scripted_model
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker.engines.transformers_engine import TransformersEngine
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.openai.worker.answer_formats import choose_format
from tsx_runtime.features.openai.worker.generation import answer
from tsx_runtime.features.openai.worker.messages import Message

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
LLAMA = (
    HEAD + '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson'
    " }}}" + TAIL
)
MISTRAL = (
    HEAD + "{% if call.id | length != 9 %}{{ raise_exception('A call has a wrong id.') }}{% endif"
    " %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}" + TAIL
)
CODER = (
    HEAD + "<tool_call>\n<function={{ call.function.name }}>{% for name, value in"
    " call.function.arguments | items %}\n<parameter={{ name }}>\n{{ value }}\n</parameter>{%"
    " endfor %}\n</function>\n</tool_call>" + TAIL
)
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
CITY, DAYS = '{"city": "Rome"}', '{"city": "Oslo", "days": 2}'
TAGS = {"<tool_call>": False, "</tool_call>": False}
MISTRAL_TAGS = {"[TOOL_CALLS]": True, "[ARGS]": True}
Chat = Callable[..., Any]


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
        last_piece = self.chat(stream=True, **fields)
        lines = b"".join([*self.pieces, last_piece]).split(b"\n\n")[:-2]
        return [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 60))
    loop.close()


@pytest.fixture
def start(tmp_path: Path, run: Any) -> Iterator[Callable[..., Client]]:
    engines = []

    def start_model(*model: Any, response_template: Any = None) -> Client:
        from transformers import AutoModelForCausalLM, AutoTokenizer

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


def joined_calls(choices: Sequence[Any]) -> list[tuple[str, str]]:
    """Join the deltas of calls as OpenAI's clients do."""
    calls: list[tuple[str, str]] = []
    for choice in choices:
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + call["function"]["arguments"])
    return calls


@pytest.mark.parametrize(
    ("text", "template", "markers", "content"),
    [
        (
            f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>',
            HERMES,
            TAGS,
            "Let me see.",
        ),
        (f"[TOOL_CALLS]weather[ARGS]{CITY}", MISTRAL, MISTRAL_TAGS, ""),
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
            "</tool_call>",
            CODER,
            TAGS,
            "",
        ),
    ],
    ids=["hermes", "mistral", "qwen-coder"],
)
def test_a_call_is_parsed_streamed_and_returned_with_its_result(
    start: Callable[..., Client],
    text: str,
    template: str,
    markers: dict[str, bool],
    content: str,
) -> None:
    client = start(text, template, markers)
    choices = client.stream()
    assert joined_calls(choices) == [("weather", CITY)]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == content
    assert choices[-1]["finish_reason"] == "tool_calls"
    start_delta, *arguments = [
        part for choice in choices for part in choice["delta"].get("tool_calls", ())
    ]
    assert len(arguments) > 1
    call = start_delta | {"function": {"name": "weather", "arguments": CITY}}
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    prompt = client.generator._tokenizer.apply_chat_template(
        [Message.model_validate(item).for_template() for item in chat], tokenize=False
    )
    assert "Rome" in prompt
    assert prompt.endswith("<|tool|>sunny<|end|>")


def test_several_calls_are_numbered_or_only_the_first_is_returned(
    start: Callable[..., Client],
) -> None:
    calls = "; ".join(
        f'{{"name": "weather", "parameters": {arguments}}}' for arguments in (CITY, DAYS)
    )
    client = start(f"<|python_tag|>{calls}", LLAMA, {"<|python_tag|>": True})
    expected = [("weather", CITY), ("weather", DAYS)]
    assert joined_calls(client.stream()) == expected
    (choice,) = client.chat(parallel_tool_calls=False)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [CITY]
    (choice,) = client.chat(tools=[])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (calls, "stop")


def test_reasoning_is_split_off(start: Callable[..., Client]) -> None:
    text = f'Hm.\n</think>\n\n<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>'
    markers = TAGS | {"<think>": True, "</think>": True}
    client = start(text, REASONER, markers, "<think>")
    response = client.chat()
    message = response["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", None)
    assert message["tool_calls"][0]["function"]["arguments"] == CITY
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] > 1
    choices = client.stream()
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert joined_calls(choices) == [("weather", CITY)]
    (choice,) = client.chat(max_tokens=2)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    shown = Message.model_validate(message | {"content": "Fine."}).for_template()
    prompt = client.generator._tokenizer.apply_chat_template([shown], tokenize=False)
    assert prompt.startswith("<|assistant|><think>Hm.</think>Fine.<tool_call>")


def test_a_grammar_begins_after_the_reasoning(start: Callable[..., Client]) -> None:
    generator = start("ok", REASONER, {"<think>": True, "</think>": True}, "<think>").generator
    prompt = generator.encode_chat([{"role": "user", "content": "?"}])
    bound = choose_format(generator, prompt, [], has_grammar=True)
    assert generator.decode(bound.prompt.token_ids, {"<think>", "</think>"}).endswith(
        "<think></think>"  # This tokenizer has no token for line ends.
    )
    assert bound.new_parser().push("{}", is_last=True) == [{"content": "{}"}]
    free = choose_format(generator, prompt, [], has_grammar=False)
    assert free.prompt == prompt
    assert free.new_parser().push("{}", is_last=True) == [{"reasoning_content": "{}"}]


def test_a_tokenizers_response_template_is_followed(start: Callable[..., Client]) -> None:
    response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning_content": {"open": "<|think|>", "close": "<|/think|>"},
            "tool_calls": {
                "open_pattern": r"<\|call\|>(?P<name>\w+)",
                "close": "<|/call|>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"(?P<key>\w+)=(?P<value>\w+)"},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    markers = dict.fromkeys(["<|think|>", "<|/think|>", "<|call|>", "<|/call|>", "<|other|>"], True)
    text = "<|think|>Hm.<|/think|>Well.<|other|><|call|>weather city=Oslo days=2<|/call|>"
    client = start(text, HERMES, markers, response_template=response_template)
    choices = client.stream()
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    assert joined_calls(choices) == [("weather", DAYS)]
