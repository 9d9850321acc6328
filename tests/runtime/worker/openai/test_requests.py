"""What a body of OpenAI's API asks for, and the words for one that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.openai import tasks
from tsx_runtime.worker.openai.completions import CompletionRequest
from tsx_runtime.worker.openai.requests import NEUTRAL, read


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("m/ada", {"adapter": "ada"}), ("m:1.0/ada", {"adapter": "ada"}), ("/ada", {"adapter": "ada"}), ("m", {}), ("org/other", {})],
)
def test_an_adapter_is_named_behind_this_models_name(model: str, parameters: dict[str, Any]) -> None:
    request = tasks.read("v1/embeddings", {"model": model, "input": "a"}).task_request("m")
    assert request == (["a"], {"normalize": True} | parameters)


def test_fields_that_mean_nothing_are_taken_and_others_are_refused() -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "made_up": None, "max_tokens": None}
    assert read(CompletionRequest, {"prompt": "a", **NEUTRAL, **harmless}).prompt == ["a"]
    with pytest.raises(RefusedField, match="'logit_bias' is not supported here") as caught:
        read(CompletionRequest, {"prompt": "a", "logit_bias": {"1": 2}})
    assert (caught.value.param, caught.value.code) == ("logit_bias", "unsupported_parameter")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([1, 2], [[1, 2]]),
        *((wrong, None) for wrong in ("", [], [""], [[]], [1, "a"], ["a", 1], [-1], [True], [1.0], 5, {}, None, ["a"] * 65)),
    ],
    ids=str,
)
def test_a_prompt_is_a_text_or_tokens_or_several(prompt: Any, prompts: Any) -> None:
    if prompts is not None:
        assert read(CompletionRequest, {"prompt": prompt}).prompt == prompts
        return
    with pytest.raises(RefusedField, match=r"'prompt' is .*: it must ") as caught:
        read(CompletionRequest, {"prompt": prompt})
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")
