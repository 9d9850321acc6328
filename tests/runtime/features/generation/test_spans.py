"""The attributes of the spans of generated texts, from a worker to an OTLP collector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.runtime.conftest import make_settings, running_server
from tests.support.collector import Span, collector
from tests.support.language_models import bpe_tokenizer, generation_model
from tsx_runtime.features.tracing import otlp
from tsx_runtime.features.tracing.settings import TracingSettings

PROMPT = "Beautiful is better"
PROMPT_TOKENS = len(bpe_tokenizer()(PROMPT)["input_ids"])
CONFIG = "minWorkers: 1\nmaxWorkers: 1\n"
# The prompt is longer than a page of the cache.
MESSAGES = [{"role": "user", "content": f"{PROMPT}. " * 4}]
CHAT = {"model": "m", "messages": MESSAGES, "max_tokens": 4}
CHOICES = {**CHAT, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
NATIVE = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3, "temperature": 0}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0, "seed": 5}),
    "stream": ("/v1/chat/completions", CHOICES),
    "chunked": ("/v1/chat/completions", CHOICES),  # the ASGI lane
    "text": ("/v1/completions", {"model": "m:1.0", "prompt": PROMPT, "max_tokens": 2}),
    "responses": ("/v1/responses", {"model": "m", "input": PROMPT, "max_output_tokens": 2}),
    "native": ("/predictions/m", NATIVE),
    "native stream": ("/predictions/m", {**NATIVE, "stream": True}),
    "refused": ("/v1/completions", {"model": "m", "prompt": PROMPT, "top_p": 7}),
}


class Traced(NamedTuple):
    """The answers by the key of `REQUESTS`, and their spans."""

    answers: dict[str, httpx.Response]
    spans: list[Span]

    def attributes(self, key: str) -> dict[str, Any]:
        """Return the attributes of the handler's span, without the prefix `gen_ai.`."""
        (attributes,) = (
            span.attributes
            for span in self.spans
            if (span.trace_id, span.name) == (trace_id(key), "handler")
        )
        return {
            name.removeprefix("gen_ai."): value
            for name, value in attributes.items()
            if name.startswith("gen_ai.")
        }

    def reasons(self, key: str) -> list[str]:
        values = self.attributes(key)["response.finish_reasons"].values
        return [value.string_value for value in values]


def trace_id(key: str) -> str:
    return f"{[*REQUESTS].index(key) + 1:032x}"


@pytest.fixture(scope="module")
def traced(
    processes: None, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Traced]:
    store = tmp_path_factory.mktemp("store")
    generation_model(store / "m", llama, config=CONFIG)
    answers = {}
    with collector() as received:
        settings = TracingSettings(otlp_endpoint=received.url, trace_share=0)
        with (
            otlp.tracing(settings, {}) as tracer,
            running_server(make_settings(store), tracer=tracer) as server,
        ):
            server.register("m", initial_workers=1)
            for key, (path, body) in REQUESTS.items():
                content = json.dumps(body).encode()
                sampled = {"traceparent": f"00-{trace_id(key)}-00f067aa0ba902b7-01"}
                for name, headers in ((key, sampled), (f"untraced {key}", {})):
                    answers[name] = server.inference.post(
                        path,
                        content=iter([content]) if key == "chunked" else content,
                        headers={"content-type": "application/json", **headers},
                    )
        yield Traced(answers, received.spans)


def test_a_chats_span_has_the_attributes_of_the_conventions(traced: Traced) -> None:
    answer, attributes = traced.answers["chat"].json(), traced.attributes("chat")
    expected = {
        "operation.name": "chat",
        "provider.name": "tsx",
        "request.model": "m",
        "request.stream": False,
        "request.max_tokens": 4,
        "request.temperature": 0.0,
        "request.seed": 5,
        "request.frequency_penalty": 0.0,
        "request.presence_penalty": 0.0,
        "response.model": "m",
        "response.id": answer["id"],
        "usage.input_tokens": answer["usage"]["prompt_tokens"],
        "usage.output_tokens": answer["usage"]["completion_tokens"],
        "usage.cache_read.input_tokens": 0,
    }
    times = {"latency.time_to_first_token", "latency.e2e"}
    assert set(attributes) == {*expected, *times, "response.finish_reasons"}
    assert attributes.items() >= expected.items()
    assert 0 < attributes["latency.time_to_first_token"] <= attributes["latency.e2e"]
    assert traced.reasons("chat") == [answer["choices"][0]["finish_reason"]]


@pytest.mark.parametrize("key", ["stream", "chunked"])
def test_the_choices_of_a_stream_are_reported_together(traced: Traced, key: str) -> None:
    attributes, chat = traced.attributes(key), traced.attributes("chat")
    text = traced.answers[key].text
    usage = json.loads(text.split("data: ")[-2])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert (
        attributes["usage.cache_read.input_tokens"]
        == (usage["prompt_tokens_details"]["cached_tokens"])
    )
    assert (attributes["request.choice.count"], attributes["request.stream"]) == (2, True)
    assert attributes["usage.input_tokens"] == chat["usage.input_tokens"]
    assert attributes["usage.output_tokens"] == 2 * chat["usage.output_tokens"]
    assert traced.reasons(key) == ["length", "length"]
    assert attributes["response.id"] in text


@pytest.mark.parametrize(
    ("key", "operation", "model", "tokens"),
    [
        ("text", "text_completion", "m:1.0", 2),
        ("responses", "chat", "m", 2),
        ("native", "text_completion", "m", 3),
        ("native stream", "text_completion", "m", 3),
    ],
)
def test_each_format_reports_its_operation(
    traced: Traced, key: str, operation: str, model: str, tokens: int
) -> None:
    attributes = traced.attributes(key)
    assert [attributes[name] for name in ("operation.name", "request.model")] == [operation, model]
    assert attributes["usage.output_tokens"] == tokens
    assert attributes["response.model"] == "m"
    if operation == "text_completion":
        assert attributes["usage.input_tokens"] == PROMPT_TOKENS
    assert ("response.id" in attributes) == (not key.startswith("native"))


def test_a_refused_request_reports_nothing(traced: Traced) -> None:
    assert traced.answers["refused"].status_code == 400
    assert traced.attributes("refused") == {}


@pytest.mark.parametrize("key", REQUESTS)
def test_clients_get_the_same_headers_with_and_without_a_trace(traced: Traced, key: str) -> None:
    assert set(traced.answers[key].headers) == set(traced.answers[f"untraced {key}"].headers)
    assert "x-tsx-span" not in traced.answers[key].headers


def test_no_span_has_text_of_a_prompt_or_an_answer(traced: Traced) -> None:
    spans = repr(traced.spans)
    assert PROMPT not in spans
    text = traced.answers["native"].json()[0]["generated_text"]
    assert text
    assert text not in spans
