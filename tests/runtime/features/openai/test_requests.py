"""Bodies of OpenAI's API, with fields that are used, ignored or refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tsx_runtime.features.openai.worker import tasks
from tsx_runtime.features.openai.worker.chat import ChatRequest
from tsx_runtime.features.openai.worker.completions import CompletionRequest
from tsx_runtime.features.openai.worker.requests import NEUTRAL_VALUES, read
from tsx_runtime.features.openai.worker.responses import ResponseRequest
from tsx_runtime.worker.codecs.bodies import RefusedField


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("m/ada", {"adapter": "ada"}),
        ("m:1.0/ada", {"adapter": "ada"}),
        ("/ada", {"adapter": "ada"}),
        ("m", {}),
        ("org/other", {}),
    ],
)
def test_an_adapter_follows_the_models_name(model: str, parameters: dict[str, Any]) -> None:
    request = tasks.read("v1/embeddings", {"model": model, "input": "a"}).task_request("m")
    assert request == (["a"], {"normalize": True} | parameters)


def test_fields_without_effect_are_accepted_and_unsupported_ones_refused() -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "made_up": None, "max_tokens": None}
    for position in (0, -1):
        neutral = {name: values[position] for name, values in NEUTRAL_VALUES.items()}
        fields = {"prompt": "a", **neutral, **harmless} | {"best_of": 1}
        assert read(CompletionRequest, fields).prompt == ["a"]
    with pytest.raises(RefusedField, match="'min_tokens' is not supported here") as exc_info:
        read(CompletionRequest, {"prompt": "a", "min_tokens": 2})
    assert (exc_info.value.param, exc_info.value.code) == ("min_tokens", "unsupported_parameter")


# The parameters of chats in OpenAI's client 3.57, in values that OpenAI's models have by default.
CHAT_DEFAULTS: dict[str, Any] = {
    "function_call": "none",
    "functions": [],
    "logit_bias": {},
    "logprobs": False,
    "max_completion_tokens": 5,
    "metadata": {},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "medium",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "seed": 1,
    "service_tier": "auto",
    "stop": None,
    "store": False,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "temperature": 1,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1,
    "user": "u",
    "verbosity": "medium",
}


def test_all_defaults_of_openais_chats_are_accepted() -> None:
    messages = [{"role": "user", "content": "a"}]
    request = read(ChatRequest, {"messages": messages, **CHAT_DEFAULTS})
    assert request.grammar(request.response_format, "response_format") is None
    for field in (
        {"verbosity": "low"},
        {"web_search_options": {}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy", "format": "wav"}},
        {"functions": [{"name": "f"}]},
        {"moderation": {"model": "m"}},
    ):
        with pytest.raises(RefusedField) as exc_info:
            read(ChatRequest, {"messages": messages, **field})
        assert (exc_info.value.param, exc_info.value.code) == (
            next(iter(field)),
            "unsupported_parameter",
        )


@pytest.mark.parametrize("salt", ["ours", None])
def test_a_cache_salt_reaches_the_engine(salt: str | None) -> None:
    generator: Any = SimpleNamespace(adapters=())
    request = read(CompletionRequest, {"prompt": "a", "cache_salt": salt})
    assert request.sampling(generator, "m", 3).cache_salt == (salt or "")
    with pytest.raises(RefusedField):
        read(CompletionRequest, {"prompt": "a", "cache_salt": ""})


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {}},
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"effort": "medium"}},
        {"include": ["reasoning.encrypted_content"]},
        {"text": {}},
        {"text": {"verbosity": None}},
        {"text": {"verbosity": "medium", "format": None}},
        {"chat_template_kwargs": {}},
        {"top_logprobs": 0},
    ],
)
def test_values_of_responses_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert len(read(ResponseRequest, {"input": "a", **fields}).input) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": ["a", {"type": "function_call"}]}, "input[0]"),
        ({"input": [{"type": "reasoning"}, {"type": "item_reference"}]}, "input[1]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_values_of_responses_that_would_change_the_answer_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusedField) as exc_info:
        read(ResponseRequest, {"input": "a", **fields}).messages()
    assert exc_info.value.param == param


@pytest.mark.parametrize("body", [{"prompt": None}, '{"prompt": null}', {}])
def test_a_null_field_counts_as_missing(body: Any) -> None:
    with pytest.raises(RefusedField, match="'prompt' is missing") as exc_info:
        read(CompletionRequest, body)
    assert exc_info.value.code == "missing_required_parameter"
    asked = {
        "prompt": "a",
        "stream_options": {"include_usage": True, "made_up": None},
        "response_format": {"type": "text", "made_up": None},
    }
    assert read(CompletionRequest, asked).stream_options is not None


@pytest.mark.parametrize("as_json", [True, False])
def test_penalties_and_biases_reach_the_engine(as_json: bool) -> None:
    penalties = {"frequency_penalty": 1, "presence_penalty": -0.5, "repetition_penalty": 1.25}
    body = {"prompt": "a", **penalties, "logit_bias": {"7": -100, "0": 1.5}}
    generator: Any = SimpleNamespace(adapters=())
    sampling = read(CompletionRequest, json.dumps(body) if as_json else body).sampling(
        generator, "m", 3
    )
    assert {name: getattr(sampling, name) for name in penalties} == penalties
    assert sampling.logit_bias == {7: -100.0, 0: 1.5}
    assert sampling.changes_scores
    neutral = dict.fromkeys(penalties, 0) | {"repetition_penalty": 1, "logit_bias": {}}
    request = read(CompletionRequest, {"prompt": "a", **neutral})
    assert not request.sampling(generator, "m", 3).changes_scores


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", [1, 2]], ["a", [1, 2]]), ([1, 2], [[1, 2]])],
)
def test_a_prompt_is_one_or_several_texts_or_token_lists(prompt: Any, prompts: Any) -> None:
    assert read(CompletionRequest, {"prompt": prompt}).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], [1, "a"], ["a", 1], [-1], [True], [1.0], 5, {}, ["a"] * 65],
    ids=str,
)
def test_an_invalid_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RefusedField, match=r"'prompt' is .*: it must ") as exc_info:
        read(CompletionRequest, {"prompt": prompt})
    assert (exc_info.value.param, exc_info.value.code) == ("prompt", "invalid_value")
