"""The handler of language models in a real worker process: Hugging Face's format, adapters,
refusals, and an engine that ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.worker.conftest import StartWorker, Worker
from tests.support.language_models import CONTEXT, bpe_tokenizer, generation_model
from tsx_archiver.metadata.huggingface import MANIFEST_KEY
from tsx_runtime.wire import Kind
from tsx_runtime.worker.generation.loading import torch_threads

PROMPT = "Beautiful is better"
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
BREAKABLE = """
from tsx_runtime.worker.handlers.huggingface.generation import HuggingFaceGeneration


class Handler(HuggingFaceGeneration):
    async def handle(self, data, context):
        if data[0]["body"] == b"break":
            def broken(*arguments):
                raise RuntimeError("the device is gone")

            self.generator._engine._lanes[None]._manager.batch_processor.update_batch = broken
            return ["broken"]
        return await super().handle(data, context)
"""


def start(
    start_worker: StartWorker,
    llama: Path,
    where: Path,
    adapters: dict[str, Path] | None = None,
    **order: Any,
) -> Worker:
    place = generation_model(where / "m", llama, adapters)
    files: dict[str, str | bytes] = {
        str(file.relative_to(place)): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file()
    }
    manifest = {MANIFEST_KEY: {"adapters": list(adapters or {})}, "model": {"modelName": "m"}}
    return start_worker(
        files=files,
        mode="async",
        **{"handler": "huggingface_generation", "manifest": manifest, **order},
    )


@pytest.fixture(scope="module")
def worker(
    start_shared_worker: StartWorker,
    llama: Path,
    adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Worker:
    worker = start(start_shared_worker, llama, tmp_path_factory.mktemp("archive"), adapters)
    assert worker.loaded, worker.report
    return worker


@pytest.fixture(scope="module")
def wanted(llama: Path) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    ids = bpe_tokenizer()(PROMPT)["input_ids"]
    found = AutoModelForCausalLM.from_pretrained(llama).generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False
    )[0]
    return list(found[len(ids) :].tolist())


def ask(worker: Worker, inputs: Any, stream: bool = False, **parameters: Any) -> Any:
    answer = worker.ask(
        json.dumps({"inputs": inputs, "parameters": parameters, "stream": stream}).encode()
    )[0]
    return json.loads(answer.body) if not stream else answer


def refusal(worker: Worker, body: bytes) -> str:
    answer = worker.ask(body)[0]
    assert answer.status == 400
    return answer.message


def test_an_answer_is_what_the_model_generates(worker: Worker, wanted: list[int]) -> None:
    text = bpe_tokenizer().decode(wanted)
    assert ask(worker, PROMPT, **GREEDY) == [{"generated_text": text}]
    assert ask(worker, PROMPT, return_full_text=True, **GREEDY) == [
        {"generated_text": PROMPT + text}
    ]
    assert json.loads(worker.ask(PROMPT.encode())[0].body)[0]["generated_text"].startswith(
        text
    )  # up to the end of the context


def test_details_have_the_tokens_with_their_logprobs(worker: Worker, wanted: list[int]) -> None:
    (found,) = ask(worker, PROMPT, details=True, **GREEDY)
    details = found["details"]
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == 12
    assert [token["id"] for token in details["tokens"]] == wanted
    assert all(token["logprob"] < 0 for token in details["tokens"])


def test_a_stream_has_the_same_text_in_pieces(worker: Worker, wanted: list[int]) -> None:
    worker.pieces.clear()
    last = ask(worker, PROMPT, stream=True, **GREEDY)
    assert b"content-type: text/event-stream" in worker.pieces[0][1]
    events = [json.loads(body.removeprefix(b"data:")) for _, _, body in worker.pieces] + [
        json.loads(last.body.removeprefix(b"data:"))
    ]
    assert [event["token"]["id"] for event in events] == wanted
    assert (
        "".join(event["token"]["text"] for event in events)
        == events[-1]["generated_text"]
        == bpe_tokenizer().decode(wanted)
    )
    assert [event["generated_text"] for event in events[:-1]] == [None] * 11
    assert events[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 12,
        "seed": None,
        "input_length": 11,
    }


def test_a_stop_string_ends_the_text_before_it(worker: Worker, wanted: list[int]) -> None:
    text = bpe_tokenizer().decode(wanted)
    (found,) = ask(worker, PROMPT, stop=[text[3:7], "never"], details=True, **GREEDY)
    assert found["generated_text"] == text[:3]
    assert found["details"]["finish_reason"] == "stop_sequence"
    assert found["details"]["generated_tokens"] < 12


def test_a_chat_goes_through_the_template(worker: Worker) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    same = f"<|user|>{PROMPT}<|end|><|assistant|>"
    assert ask(worker, messages, **GREEDY) == ask(worker, same, **GREEDY)


def test_an_adapter_is_chosen_by_request_and_counted_apart(worker: Worker) -> None:
    found = [
        ask(worker, PROMPT, adapter=name, **GREEDY)[0]["generated_text"]
        for name in (None, "polite", "terse")
    ]
    assert len(set(found)) == 3
    counted = {metric["name"]: metric for metric in worker.metrics}
    assert counted["tsx_generation_tokens_total"]["value"] == 12
    assert counted["tsx_generation_prompt_tokens_total"]["value"] == 11
    assert counted["tsx_generation_tokens_total"]["dimensions"]["adapter"] == "terse"
    assert counted["tsx_generation_time_to_first_token_seconds"]["type"] == "histogram"
    assert 0 < counted["tsx_generation_time_per_output_token_seconds"]["value"] < 60
    gauges = ("running_sequences", "waiting_sequences", "cache_use_ratio")
    assert [counted[f"tsx_generation_{name}"]["value"] for name in gauges] == [0, 0, 0]
    assert (
        "adapter" not in counted["tsx_generation_running_sequences"]["dimensions"]
    )  # else one that rests keeps its last values


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            {"inputs": "a", "parameters": {"temperature": -1}},
            "The field 'parameters.temperature' is -1: it must be greater than or equal to",
        ),
        (
            {"inputs": "a", "parameters": {"max_new_tokens": 1.5}},
            "'parameters.max_new_tokens' is 1.5: it must be a valid integer",
        ),
        (
            {"inputs": "a", "parameters": {"top_k": True}},
            "'parameters.top_k' is true: it must be a valid integer",
        ),
        (
            {"inputs": "a", "parameters": {"do_sample": "yes"}},
            "'parameters.do_sample' is \"yes\": it must be a valid boolean",
        ),
        (
            {"inputs": "a", "parameters": {"repetition_penalty": 1.2}},
            "The parameter repetition_penalty is not supported",
        ),
        ({"inputs": "a", "parameters": {"stop": [""]}}, "'parameters.stop[0]' is"),
        (
            {"inputs": "a", "parameters": {"adapter": "nobody"}},
            "This model has no adapter 'nobody'. It has polite, terse.",
        ),
        ({"inputs": "a", "parameters": []}, "parameters"),
        ({"inputs": "a", "stream": 1}, "'stream' is 1: it must be a valid boolean"),
        ({"inputs": [1, 2]}, "inputs must be a text"),
        ({}, "inputs must be a text"),
        ({"inputs": ""}, "The prompt has 0 tokens"),
        (
            {"inputs": "a " * 100_000},
            f"The prompt has 200,000 characters, which the model's context of {CONTEXT} tokens does not hold.",
        ),
        (
            {"inputs": "a", "parameters": {"max_new_tokens": CONTEXT}},
            "for both. Shorten the prompt, or ask for fewer.",
        ),
        (
            {"inputs": "a " * CONTEXT},
            f"for the model's context of {CONTEXT} holds prompt and answer. Shorten it.",
        ),
        (
            {"inputs": [{"role": "oracle", "content": "a"}]},
            "The model's chat template refuses these messages: TemplateError: there is no role oracle",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(worker: Worker, body: Any, says: str) -> None:
    if body == {"inputs": "a", "parameters": []}:
        body = {"inputs": "a", "parameters": [1]}
    assert says in refusal(worker, json.dumps(body).encode())


def test_a_body_that_is_no_json_is_refused(worker: Worker) -> None:
    assert "The body cannot be read: Invalid JSON" in refusal(worker, b'{"inputs": ')
    assert "neither JSON nor UTF-8" in refusal(worker, b"\xff\xfe")


def test_a_client_that_leaves_ends_its_sequence(worker: Worker) -> None:
    batch = worker.begin(
        json.dumps(
            {"inputs": PROMPT, "parameters": {"max_new_tokens": 240}, "stream": True}
        ).encode()
    )
    for _ in range(3):
        frame = worker.receive()
        assert frame is not None
        assert frame.kind is Kind.PIECE
    worker.send(Kind.CANCEL, batch)
    while frame is not None and frame.kind is Kind.PIECE:
        frame = worker.receive()
    assert frame is not None
    assert frame.kind is Kind.REPLY
    ask(worker, "a", max_new_tokens=1)
    counted = {metric["name"]: metric["value"] for metric in worker.metrics}
    assert (
        counted["tsx_generation_running_sequences"],
        counted["tsx_generation_cache_use_ratio"],
    ) == (0, 0)


def test_an_engine_that_ends_ends_its_worker(
    start_worker: StartWorker, llama: Path, tmp_path: Path
) -> None:
    place = generation_model(tmp_path / "m", llama)
    files: dict[str, str | bytes] = {
        str(file.relative_to(place)): file.read_bytes()
        for file in place.rglob("*")
        if file.is_file()
    }
    worker = start_worker(BREAKABLE, files=files, mode="async")
    assert worker.loaded, worker.report
    worker.begin(
        json.dumps(
            {"inputs": PROMPT, "parameters": {"max_new_tokens": 240}, "stream": True}
        ).encode()
    )
    frame = worker.receive()
    assert frame is not None
    assert frame.kind is Kind.PIECE
    worker.begin(b"break")
    seen = []
    while (frame := worker.receive()) is not None:
        seen.append(frame)
    failed = [
        bytes(body)
        for each in seen
        if each.kind is Kind.REPLY
        for status, _, body in each.items
        if status == 500
    ]
    assert any(b"the device is gone" in body for body in failed)
    assert worker.ended() is not None


def test_the_precision_of_the_configuration_is_what_runs(
    start_worker: StartWorker, llama: Path, tmp_path: Path
) -> None:
    worker = start(start_worker, llama, tmp_path, model_config={"precision": "bf16"})
    assert (worker.loaded, worker.report["precision"]) == (True, "bf16")
    assert ask(worker, PROMPT, **GREEDY)[0]["generated_text"]


def test_a_directory_without_a_model_says_what_is_wrong(start_worker: StartWorker) -> None:
    worker = start_worker(
        files={"huggingface_model/README.md": "nothing"},
        handler="huggingface_generation",
        mode="async",
    )
    assert not worker.loaded
    assert "The archive has no huggingface_model/config.json" in worker.report["message"]


@pytest.mark.parametrize(
    ("parameters", "cores", "threads"),
    [(3_000_000, 8, 7), (3_000_000, 1, 1), (1_000_000_000, 8, 8)],
)
def test_a_small_model_leaves_a_core_to_the_event_loops(
    parameters: int, cores: int, threads: int
) -> None:
    assert torch_threads(parameters, cores) == threads
