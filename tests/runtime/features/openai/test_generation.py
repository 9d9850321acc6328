"""Texts of OpenAI's API by a real engine, which must equal those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.runtime.features.generation.conftest import Run
from tests.runtime.features.generation.conftest import llama as llama
from tests.runtime.features.generation.conftest import run as run
from tests.runtime.features.generation.test_transformers_engine import DEVICE, model_of, started
from tests.support.language_models import CONTEXT, bpe_tokenizer
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.metrics import GenerationMetrics
from tsx_runtime.features.openai.worker.generation import answer
from tsx_runtime.worker.handler_api.testing import MockContext

PROMPT = "Beautiful is better"
MESSAGES = [{"role": "user", "content": "Now is better than never."}]
BIAS = {7: 3.0, 90: -100.0, 12: 2.5, 100: 4.0}
TOKENS = 10


class Client:
    """A client of one model, which keeps the status of its last response."""

    def __init__(self, generator: TextGenerator, run: Run) -> None:
        self._generator, self._run = generator, run
        self.status = 0

    def post(self, path: str, **body: Any) -> Any:
        context = MockContext(model_name="m")
        response = self._run(answer(path, body, self._generator, context, "m"))
        self.status = context.get_response_status(0)[0] or 200
        return response

    def complete(self, **fields: Any) -> Any:
        return self.post("v1/completions", **{"prompt": PROMPT, "max_tokens": TOKENS} | fields)

    def texts(self, **fields: Any) -> list[str]:
        return [choice["text"] for choice in self.complete(**fields)["choices"]]


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return model_of(llama)


@pytest.fixture(scope="module")
def client(llama: Path, model: Any, run: Run) -> Iterator[Client]:
    with started(run, llama) as engine:
        tokenizer = bpe_tokenizer()
        generator = TextGenerator(
            tokenizer,
            engine,
            model.generation_config,
            len(tokenizer),
            GenerationMetrics(None, ""),
        )
        yield Client(generator, run)


def generate(model: Any, prompt: list[int], bias: dict[int, float] | None = None) -> Any:
    """Return the text of `generate`, its tokens, and their log probabilities before the bias."""
    output = model.generate(
        torch.tensor([prompt], device=DEVICE),
        max_new_tokens=TOKENS,
        do_sample=False,
        sequence_bias=bias and [[[token], value] for token, value in bias.items()],
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0][len(prompt) :].tolist()
    logprobs = torch.cat(output.logits).log_softmax(-1)
    return bpe_tokenizer().decode(tokens, skip_special_tokens=True), tokens, logprobs


def bytes_of(token: str) -> bytes:
    r"""Return the bytes of a token, which may be a part of a character as `bytes:\xe2`."""
    if not token.startswith("bytes:"):
        return token.encode()
    return token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "biased"])
def test_completions_equal_those_of_generate(
    client: Client, model: Any, bias: dict[int, float] | None
) -> None:
    text, tokens, logprobs = generate(model, bpe_tokenizer()(PROMPT)["input_ids"], bias)
    named_bias = bias and {str(token): value for token, value in bias.items()}
    response = client.complete(n=2, logprobs=3, temperature=0, logit_bias=named_bias)
    assert [choice["text"] for choice in response["choices"]] == [text, text]
    for choice in response["choices"]:
        values = choice["logprobs"]
        chosen = [logprobs[step, token].item() for step, token in enumerate(tokens)]
        assert values["token_logprobs"] == pytest.approx(chosen, abs=1e-4)
        assert b"".join(map(bytes_of, values["tokens"])).decode(errors="replace") == text
        for step, top in enumerate(values["top_logprobs"]):
            likeliest = logprobs[step].topk(3)
            # Of tokens with the same text, such as special ones, the likeliest is shown.
            expected = {
                bpe_tokenizer().decode(token, skip_special_tokens=True): logprob.item()
                for logprob, token in zip(*(part.flip(0) for part in likeliest), strict=True)
            }
            for values_by_text in (top, expected):
                for key in [key for key in values_by_text if "bytes:" in key or "\ufffd" in key]:
                    del values_by_text[key]
            assert top == pytest.approx(expected, abs=1e-4)
    assert response["usage"]["completion_tokens"] == 2 * len(tokens)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "biased"])
def test_chats_and_responses_equal_those_of_generate(
    client: Client, model: Any, bias: dict[int, float] | None
) -> None:
    prompt = bpe_tokenizer().apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    text, tokens, logprobs = generate(model, prompt, bias)
    fields = {
        "temperature": 0,
        "logit_bias": bias and {str(token): value for token, value in bias.items()},
    }
    chat = client.post(
        "v1/chat/completions",
        messages=MESSAGES,
        max_completion_tokens=TOKENS,
        logprobs=True,
        top_logprobs=2,
        **fields,
    )
    (choice,) = chat["choices"]
    assert choice["message"]["content"] == text
    chosen = [logprobs[step, token].item() for step, token in enumerate(tokens)]
    content = choice["logprobs"]["content"]
    assert [token["logprob"] for token in content] == pytest.approx(chosen, abs=1e-4)
    top = [[candidate["logprob"] for candidate in token["top_logprobs"]] for token in content]
    assert torch.tensor(top).allclose(logprobs.topk(2).values.cpu(), atol=1e-4)
    response = client.post("v1/responses", input=MESSAGES, max_output_tokens=TOKENS, **fields)
    assert response["output"][0]["content"][0]["text"] == text


def test_seeded_texts_differ_and_repeat(client: Client) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    texts = client.texts(n=4, **sampling)
    assert len(set(texts)) == 4
    assert client.texts(n=4, **sampling) == texts
    # Each text has a seed of its own, which also works alone.
    assert client.texts(n=1, **sampling | {"seed": 9}) == texts[2:3]
    assert client.texts(n=4, **sampling | {"seed": 70}) != texts


def test_the_best_texts_are_the_most_likely_of_all(client: Client) -> None:
    sampling = {"temperature": 1.2, "seed": 3, "prompt": [PROMPT, "a"]}
    candidates = client.complete(n=4, logprobs=0, **sampling)["choices"]
    best = [
        sorted(
            candidates[start : start + 4],
            key=lambda choice: -fmean(choice["logprobs"]["token_logprobs"]),
        )[:2]
        for start in (0, 4)
    ]
    response = client.complete(n=2, best_of=4, **sampling)
    expected = [choice["text"] for choices in best for choice in choices]
    assert [choice["text"] for choice in response["choices"]] == expected
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in response["choices"])
    # All texts count, also those that are not returned.
    assert response["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["token_logprobs"]) for choice in candidates
    )
    shown = client.complete(n=1, best_of=4, logprobs=0, **sampling)["choices"]
    assert [choice["logprobs"]["tokens"] for choice in shown] == [
        choices[0]["logprobs"]["tokens"] for choices in best
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", {"messages": MESSAGES, "max_tokens": CONTEXT}),
        ("v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": CONTEXT}),
        ("v1/completions", {"prompt": PROMPT, "max_tokens": CONTEXT}),
        ("v1/completions", {"prompt": [1] * CONTEXT}),
        ("v1/completions", {"prompt": "a" * 100_000}),
        ("v1/responses", {"input": MESSAGES, "max_output_tokens": CONTEXT}),
    ],
)
def test_more_tokens_than_the_context_are_refused_as_by_openai(
    client: Client, path: str, body: dict[str, Any]
) -> None:
    error = client.post(path, **body)["error"]
    assert (client.status, error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )
    # LiteLLM and other clients look for these words.
    assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
