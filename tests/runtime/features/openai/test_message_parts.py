"""Images and sounds in the messages of a chat."""

from __future__ import annotations

import asyncio
import base64
import threading
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.sources.conftest import http_server, send
from tests.support.language_models import bpe_tokenizer
from tests.support.multimodal_models import (
    CONTEXT,
    MODELS,
    data_url,
    image_part,
    png,
    sound_part,
    text_part,
    wav,
)
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.media import MediaProcessor
from tsx_runtime.features.generation.worker.media_files import UrlSettings
from tsx_runtime.features.openai.worker.chat import ChatReply
from tsx_runtime.features.openai.worker.generation import answer
from tsx_runtime.features.openai.worker.replies import Continuation
from tsx_runtime.features.openai.worker.responses import ResponseReply
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.handler_api.testing import MockContext

IMAGE, SOUND = png(), wav()


def generator_of(tokenizer: Any, media: MediaProcessor | None) -> TextGenerator:
    engine: Any = SimpleNamespace(context_length=CONTEXT, adapters=())
    metrics: Any = None
    return TextGenerator(tokenizer, engine, None, len(tokenizer), metrics, media)


@pytest.fixture(scope="module")
def generators() -> dict[str, TextGenerator]:
    processors = {kind: MODELS[kind]()[1] for kind in ("llava", "qwen2_audio")}
    media = {
        kind: generator_of(processor.tokenizer, MediaProcessor(processor, UrlSettings()))
        for kind, processor in processors.items()
    }
    return media | {"text": generator_of(bpe_tokenizer(), None)}


def chat(generator: TextGenerator, *content: Any, **fields: Any) -> Continuation:
    body = {"messages": [{"role": "user", "content": list(content)}], **fields}
    return ChatReply(body, generator, "m").continuations[0]


def test_parts_become_placeholders_and_features(generators: dict[str, TextGenerator]) -> None:
    generator = generators["llava"]
    prompt, _, media = chat(
        generator, text_part("Compare "), image_part(IMAGE), text_part(" and "), image_part(IMAGE)
    )
    image = generator._tokenizer.convert_tokens_to_ids("<image>")
    places = [index for index, token in enumerate(prompt) if token == image]
    assert len(places) == 8
    assert generator.decode(prompt[: places[0]] + prompt[places[3] + 1 : places[4]]) == (
        "Compare  and "
    )
    assert media is not None
    assert media.features["pixel_values"].shape == (2, 3, 28, 28)


def test_a_sound_becomes_features(generators: dict[str, TextGenerator]) -> None:
    _, _, media = chat(generators["qwen2_audio"], sound_part(SOUND), text_part("What is it?"))
    assert media is not None
    assert media.features["input_features"].shape == (1, 16, 200)


def test_plain_texts_have_no_media(generators: dict[str, TextGenerator]) -> None:
    generator = generators["llava"]
    prompt, _, media = chat(generator, text_part("Hello "), text_part("you"))
    assert media is None
    assert (
        prompt
        == ChatReply({"messages": [{"role": "user", "content": "Hello you"}]}, generator, "m")
        .continuations[0]
        .prompt
    )


def test_responses_have_images_too(generators: dict[str, TextGenerator]) -> None:
    content = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": data_url(IMAGE)},
    ]
    body = {"input": [{"role": "user", "content": content}]}
    (continuation,) = ResponseReply(body, generators["llava"], "m").continuations
    assert (
        continuation.prompt
        == chat(generators["llava"], text_part("What is it?"), image_part(IMAGE)).prompt
    )


@pytest.mark.parametrize(
    ("kind", "part", "param"),
    [
        ("text", image_part(IMAGE), "image_url"),
        ("text", sound_part(SOUND), "input_audio"),
        ("llava", sound_part(SOUND), "input_audio"),
        ("qwen2_audio", image_part(IMAGE), "image_url"),
        ("llava", image_part(IMAGE[:50]), "image_url"),
        ("llava", {"type": "image_url", "image_url": {"url": "data:image/png,%%%"}}, "image_url"),
        ("llava", {"type": "image_url", "image_url": {"url": "http://a.b/c.png"}}, "image_url"),
        ("qwen2_audio", sound_part(b"RIFF no sound"), "input_audio"),
    ],
)
def test_what_the_model_cannot_read_is_refused_with_its_field(
    generators: dict[str, TextGenerator], kind: str, part: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusedField) as exc_info:
        chat(generators[kind], text_part("What is it?"), part)
    assert exc_info.value.error_code == 400
    assert exc_info.value.param == f"messages[0].content[1].{param}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "input_audio", "input_audio": {"format": "wav"}},
        {"type": "text", "image_url": {"url": "data:,"}},
        {"type": "video_url", "video_url": {"url": "data:,"}},
    ],
)
def test_a_part_without_its_field_is_refused(
    generators: dict[str, TextGenerator], part: dict[str, Any]
) -> None:
    with pytest.raises(RefusedField) as exc_info:
        chat(generators["llava"], part)
    assert str(exc_info.value.param).startswith("messages[0].content[0]")


def test_an_image_of_a_response_is_named_by_its_item(generators: dict[str, TextGenerator]) -> None:
    image = {"type": "input_image", "image_url": "data:image/png,%%%"}
    items = [{"type": "reasoning"}, {"role": "user", "content": [image]}]
    with pytest.raises(RefusedField) as exc_info:
        ResponseReply({"instructions": "Be brief.", "input": items}, generators["llava"], "llava")
    assert exc_info.value.param == "input[1].content[0].image_url"


def test_the_number_of_images_is_limited(generators: dict[str, TextGenerator]) -> None:
    unreadable = image_part(b"")  # The count is refused before a file is read.
    with pytest.raises(RefusedField, match="more than 16") as exc_info:
        chat(generators["llava"], *[unreadable] * 17)
    assert exc_info.value.param == "messages[0].content[16].image_url"


def test_a_chat_of_text_does_not_wait_for_images(
    generators: dict[str, TextGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = generators["llava"]
    monkeypatch.setattr(generator.media, "_lock", None)
    assert chat(generator, text_part("Hello")).prompt
    with pytest.raises(TypeError):
        chat(generator, image_part(IMAGE))


def test_images_are_decoded_once_for_a_chat_with_tools(
    generators: dict[str, TextGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, prompts = generators["llava"], list[Any]()
    assert generator.media is not None
    encode = generator.media.encode

    def record(*arguments: Any) -> Any:
        prompts.append(encode(*arguments))
        return prompts[-1]

    monkeypatch.setattr(generator.media, "encode", record)
    template = "{% if tools %}tools: clock{% endif %}" + generator.chat_template
    monkeypatch.setattr(generator.media.processor, "chat_template", template)
    tools = [{"type": "function", "function": {"name": "clock"}}]
    continuation = chat(generator, image_part(IMAGE), tools=tools)
    assert "tools: clock" in generator.decode(continuation.prompt)
    assert [prompt.token_ids for prompt in prompts] == [continuation.prompt]


def test_downloads_of_images_block_no_other_thread(
    generators: dict[str, TextGenerator], without_proxies: None
) -> None:
    has_begun, may_answer = threading.Event(), threading.Event()

    def respond(request: BaseHTTPRequestHandler) -> None:
        has_begun.set()
        send(request, 404 if may_answer.wait(20) else 403, Content_Length=0)

    async def ask(port: int) -> list[Any]:
        processor = generators["llava"]._renderer
        media = MediaProcessor(processor, UrlSettings([f"127.0.0.1:{port}"]))
        generator = generator_of(processor.tokenizer, media)
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        requests = [
            asyncio.ensure_future(
                answer("v1/chat/completions", body, generator, MockContext(), "m")
            )
            for _ in range(40)
        ]
        await asyncio.to_thread(has_begun.wait, 20)
        await asyncio.to_thread(may_answer.set)
        return await asyncio.gather(*requests)

    with http_server(respond) as port:
        responses = asyncio.run(ask(port))
    assert ["404" in response["error"]["message"] for response in responses] == [True] * 40


def test_placeholders_in_a_text_do_not_shift_the_images(
    generators: dict[str, TextGenerator],
) -> None:
    with pytest.raises(Exception, match="processor refuses this chat"):
        chat(generators["llava"], text_part("<image>"), image_part(IMAGE))


def test_base64_without_a_url_is_read(generators: dict[str, TextGenerator]) -> None:
    part = {"type": "image_url", "image_url": base64.b64encode(IMAGE).decode()}
    assert chat(generators["llava"], part).media is not None
