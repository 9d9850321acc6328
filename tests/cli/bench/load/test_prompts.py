"""Prompts with a distribution of lengths, as requests of each protocol."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.models import make_model
from tsx_archiver import write_archive
from tsx_archiver.pretrained import pretrained_spec
from tsx_cli.bench.load.inputs import MAX_TOKENS, Lengths, choose_payloads, parse_lengths, prompts
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.protocols import render
from tsx_cli.common.failure import UsageError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("64", Lengths("constant", 64)),
        ("constant:3", Lengths("constant", 3)),
        ("uniform:16,256", Lengths("uniform", 16, 256)),
        (" lognormal:64,0.6 ", Lengths("lognormal", 64, 0.6)),
    ],
)
def test_a_distribution_has_a_kind_and_parameters(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--x") == lengths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "6.5",
        "uniform:9",
        "uniform:9,3",
        "uniform:1,2.5",
        "normal:3,1",
        "64,2",
        "lognormal:64",
        "9999999",
    ],
)
def test_invalid_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--x: '.*' is not a length in tokens"):
        parse_lengths(text, "--x")


def lengths_of(text: str, count: int = 400) -> list[int]:
    payloads = prompts(
        parse_lengths(text, "--x"), Lengths("constant", 9), ["one", "two"], count, seed=3
    )
    return [len(json.loads(payload.body)["inputs"].split()) for payload in payloads]


def test_prompts_have_the_lengths_of_their_distribution() -> None:
    assert set(lengths_of("7")) == {7}
    uniform = lengths_of("uniform:3,6")
    assert set(uniform) == {3, 4, 5, 6}
    lengths = lengths_of("lognormal:64,0.6")
    assert 58 <= median(lengths) <= 70
    assert min(lengths) < 30 < 150 < max(lengths) < MAX_TOKENS
    # The same seed gives the same lengths.
    assert lengths_of("lognormal:64,0.6") == lengths


def body_of(protocol: str, payload: Payload, version: str | None = None) -> tuple[bytes, Any]:
    head, _, body = render(protocol, "http://h", "m", payload, version=version).partition(
        b"\r\n\r\n"
    )
    return head.split(b" ")[1], json.loads(body)


def test_a_prompt_becomes_an_openai_request() -> None:
    (payload,) = prompts(Lengths("constant", 2), Lengths("constant", 8), ["hello"], 1)
    parameters = {"max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    chat = {
        "model": "m:2.0",
        "messages": [{"role": "user", "content": "hello hello"}],
        **parameters,
    }
    assert body_of("openai-chat", payload, "2.0") == (b"/v1/chat/completions", chat)
    assert body_of("openai-completions", payload) == (
        b"/v1/completions",
        {"model": "m", "prompt": "hello hello", **parameters},
    )
    assert body_of("openai-completions", Payload(b"hello", "text/plain"))[1]["prompt"] == "hello"
    recorded_payload = Payload(
        b'{"model":"old","messages":[],"stream":false,"seed":1}', "application/json"
    )
    assert body_of("openai-chat", recorded_payload)[1] == {
        "model": "m",
        "messages": [],
        "stream": False,
        "seed": 1,
    }
    assert body_of("tsx", payload)[1]["parameters"] == {"max_new_tokens": 8}


def test_a_chat_model_gets_prompts_unless_it_has_samples(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m.mar", "class Talker:\n    input_kind = 'chat'\n")
    payloads, source = choose_payloads(model)
    assert json.loads(payloads[0].body)["parameters"] == {"max_new_tokens": 64}
    assert source == "generated: 256 different prompts of lognormal:64,0.6 words"
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"weights")
    spec, _ = pretrained_spec(tmp_path / "llama", source="llama")
    # The sample that `tsx archive` generates is ignored.
    assert choose_payloads(write_archive(spec, tmp_path))[1] == source
    sampled = replace(spec, contents={"samples/own.json": b"{}"})
    assert (
        choose_payloads(write_archive(sampled, tmp_path, force=True))[1]
        == "samples/ of the archive"
    )
    assert (
        choose_payloads(None, prompt_tokens="3")[1] == "generated: 256 different prompts of 3 words"
    )
    with pytest.raises(UsageError, match="give --prompt-tokens"):
        choose_payloads(model, max_tokens="3")
    with pytest.raises(UsageError, match="--prompt-tokens makes prompts; leave --input"):
        choose_payloads(None, [tmp_path], prompt_tokens="3")
