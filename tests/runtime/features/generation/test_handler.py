"""The handler of language models in a real worker process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.worker.conftest import StartWorker, Worker
from tests.support.language_models import CONTEXT, bpe_tokenizer, generation_model
from tsx_archiver.metadata.huggingface import MANIFEST_KEY
from tsx_runtime.wire import Kind

PROMPT = "Beautiful is better"
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
BREAKABLE_HANDLER = """
from tsx_runtime.features.huggingface.worker.generation import HuggingFaceGeneration


class Handler(HuggingFaceGeneration):
    async def handle(self, data, context):
        if data[0]["body"] == b"break":
            def broken(*arguments):
                raise RuntimeError("the device is gone")

            self.generator._engine._engines[None]._manager.batch_processor.update_batch = broken
            return ["broken"]
        return await super().handle(data, context)
"""


def start(
    start_worker: StartWorker,
    llama: Path,
    root: Path,
    adapters: dict[str, Path] | None = None,
    source: str | None = None,
    **order: Any,
) -> Worker:
    """Start a worker with a model; its handler is `source`, or by default that of tsx."""
    directory = generation_model(root / "m", llama, adapters)
    files: dict[str, str | bytes] = {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }
    order["manifest"] = {
        MANIFEST_KEY: {"adapters": list(adapters or {})},
        "model": {"modelName": "m"},
    }
    if source is None:
        order["handler"] = "huggingface_generation"
    worker = start_worker(source, files=files, mode="async", **order)
    assert worker.loaded, worker.report
    return worker


@pytest.fixture(scope="module")
def worker(
    start_shared_worker: StartWorker,
    llama: Path,
    adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Worker:
    return start(start_shared_worker, llama, tmp_path_factory.mktemp("archive"), adapters)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    """Generate the expected answer with transformers only."""
    import torch
    from transformers import AutoModelForCausalLM

    prompt = bpe_tokenizer()(PROMPT)["input_ids"]
    answer = AutoModelForCausalLM.from_pretrained(llama).generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False
    )[0]
    return list(answer[len(prompt) :].tolist())


def request(inputs: Any, stream: bool = False, **parameters: Any) -> bytes:
    return json.dumps({"inputs": inputs, "parameters": parameters, "stream": stream}).encode()


def ask(worker: Worker, inputs: Any = PROMPT, **parameters: Any) -> Any:
    """Return the answer to a request, by default twelve greedy tokens."""
    (answer,) = worker.ask_json(request(inputs, **{**GREEDY, **parameters}))
    return answer


def refusal(worker: Worker, body: bytes) -> str:
    answer = worker.ask(body)[0]
    assert answer.status == 400
    return answer.message


def metrics_of(worker: Worker) -> dict[str, Any]:
    prefix = "tsx_generation_"
    return {metric["name"].removeprefix(prefix): metric for metric in worker.metrics}


def test_an_answer_is_the_models_generated_text(worker: Worker, expected: list[int]) -> None:
    text = bpe_tokenizer().decode(expected)
    assert ask(worker) == {"generated_text": text}
    assert ask(worker, return_full_text=True) == {"generated_text": PROMPT + text}
    # The answer to a plain text is only limited by the context.
    assert worker.ask_json(PROMPT.encode())[0]["generated_text"].startswith(text)


def test_details_have_the_tokens_with_their_logprobs(worker: Worker, expected: list[int]) -> None:
    details = ask(worker, details=True)["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 12)
    assert [token["id"] for token in details["tokens"]] == expected
    assert all(token["logprob"] < 0 for token in details["tokens"])


def test_a_stream_has_the_same_text_in_pieces(worker: Worker, expected: list[int]) -> None:
    worker.pieces.clear()
    (body,) = worker.ask_bodies(request(PROMPT, stream=True, **GREEDY))
    assert b"content-type: text/event-stream" in worker.pieces[0][1]
    parts = [*(body for _, _, body in worker.pieces), body]
    events = [json.loads(part.removeprefix(b"data:")) for part in parts]
    assert [event["token"]["id"] for event in events] == expected
    text = "".join(event["token"]["text"] for event in events)
    assert text == events[-1]["generated_text"] == bpe_tokenizer().decode(expected)
    assert [event["generated_text"] for event in events[:-1]] == [None] * 11
    assert events[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 12,
        "seed": None,
        "input_length": 11,
    }


def test_a_stop_string_ends_the_text_before_it(worker: Worker, expected: list[int]) -> None:
    text = bpe_tokenizer().decode(expected)
    answer = ask(worker, stop=[text[3:7], "never"], details=True)
    assert answer["generated_text"] == text[:3]
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["details"]["generated_tokens"] < 12


def test_a_grammar_binds_the_text(worker: Worker) -> None:
    grammar = {"type": "json", "value": {"enum": ["grün"]}}
    assert ask(worker, grammar=grammar) == {"generated_text": '"grün"'}
    grammar = {"type": "json", "value": '{"const": 7}'}
    assert ask(worker, grammar=grammar) == {"generated_text": "7"}
    grammar = {"type": "regex", "value": "[0-9]{3}z"}
    assert re.fullmatch("[0-9]{3}z", ask(worker, grammar=grammar)["generated_text"])


def test_a_chat_goes_through_the_template(worker: Worker) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    assert ask(worker, messages) == ask(worker, f"<|user|>{PROMPT}<|end|><|assistant|>")


def test_an_adapter_is_chosen_by_request_and_has_its_own_metrics(worker: Worker) -> None:
    texts = [ask(worker, adapter=name)["generated_text"] for name in (None, "polite", "terse")]
    assert len(set(texts)) == 3
    metrics = metrics_of(worker)
    assert metrics["tokens_total"]["value"] == 12
    assert metrics["prompt_tokens_total"]["value"] == 11
    assert metrics["cached_tokens_total"]["value"] == 0
    assert metrics["tokens_total"]["dimensions"]["adapter"] == "terse"
    assert metrics["time_to_first_token_seconds"]["type"] == "histogram"
    assert 0 < metrics["time_per_output_token_seconds"]["value"] < 60
    # Gauges are not per adapter, since an idle adapter's gauge would keep its last value.
    for gauge in ("running_sequences", "waiting_sequences", "cache_use_ratio"):
        assert metrics[gauge]["value"] == 0
        assert "adapter" not in metrics[gauge]["dimensions"]


@pytest.mark.parametrize(
    ("inputs", "parameters", "reason"),
    [
        ("a", {"temperature": -1}, "'parameters.temperature' is -1"),
        ("a", {"max_new_tokens": 1.5}, "'parameters.max_new_tokens' is 1.5"),
        ("a", {"top_k": True}, "'parameters.top_k' is true"),
        ("a", {"do_sample": "yes"}, "'parameters.do_sample' is \"yes\""),
        ("a", {"repetition_penalty": 1.2}, "'parameters.repetition_penalty' is not supported"),
        ("a", {"stop": [""]}, "'parameters.stop[0]' is"),
        ("a", {"grammar": {"type": "regex", "value": "("}}, "The grammar (regex) cannot be used"),
        ("a", {"adapter": "nobody"}, "no adapter 'nobody'. It has polite, terse."),
        ("a", [1], "parameters"),
        ([1, 2], {}, "inputs must be a text"),
        ("", {}, "The prompt has 0 tokens"),
        ("a " * 100_000, {}, f"{CONTEXT} tokens, which cannot hold the 200,000 characters"),
        ("a", {"max_new_tokens": CONTEXT}, "Shorten the prompt, or ask for fewer."),
        ("a " * CONTEXT, {}, f"context length is {CONTEXT} tokens. However, the prompt has"),
        ([{"role": "oracle", "content": "a"}], {}, "TemplateError: there is no role oracle"),
    ],
)
def test_an_invalid_request_is_refused_with_the_name_of_the_field(
    worker: Worker, inputs: Any, parameters: Any, reason: str
) -> None:
    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    assert reason in refusal(worker, body)


def test_a_body_that_is_not_a_request_is_refused(worker: Worker) -> None:
    assert "Invalid JSON" in refusal(worker, b'{"inputs": ')
    assert "neither JSON nor UTF-8" in refusal(worker, b"\xff\xfe")
    assert "inputs must be a text" in refusal(worker, b"{}")
    assert "'stream' is 1" in refusal(worker, b'{"inputs": "a", "stream": 1}')


def begin_stream(worker: Worker) -> int:
    """Begin a streamed answer that nearly fills the context; return its batch."""
    batch = worker.begin(request(PROMPT, stream=True, max_new_tokens=240))
    worker.expect(Kind.PIECE)
    return batch


def test_a_client_that_leaves_ends_its_sequence(worker: Worker) -> None:
    worker.send(Kind.CANCEL, begin_stream(worker))
    frame = worker.receive()
    while frame is not None and frame.kind is Kind.PIECE:
        frame = worker.receive()
    assert frame is not None
    assert frame.kind is Kind.REPLY
    ask(worker, "a", max_new_tokens=1)
    metrics = metrics_of(worker)
    assert [metrics[name]["value"] for name in ("running_sequences", "cache_use_ratio")] == [0, 0]


@pytest.mark.nightly
def test_a_model_has_the_configured_precision_and_the_worker_ends_with_its_engine(
    start_worker: StartWorker, llama: Path, tmp_path: Path
) -> None:
    config = {"precision": "bf16"}
    worker = start(start_worker, llama, tmp_path, source=BREAKABLE_HANDLER, model_config=config)
    assert worker.report["precision"] == "bf16"
    assert ask(worker)["generated_text"]
    begin_stream(worker)
    worker.begin(b"break")
    failures = []
    while (frame := worker.receive()) is not None:
        if frame.kind is Kind.REPLY:
            failures += [bytes(body) for status, _, body in frame.items if status == 500]
    assert any(b"the device is gone" in body for body in failures)
    assert worker.ended() is not None


def test_a_directory_without_a_model_does_not_load(start_worker: StartWorker) -> None:
    worker = start_worker(
        files={"huggingface_model/README.md": "nothing"},
        handler="huggingface_generation",
        mode="async",
    )
    assert not worker.loaded
    assert "huggingface_model/config.json" in worker.report["message"]
