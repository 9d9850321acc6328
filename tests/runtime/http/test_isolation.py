"""A batch of 32 that fails in a real worker behind a real server: each client gets what its own
request deserves.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx

HANDLER = """
import time
from pathlib import Path
import torch

sizes = []

def handle(data, context):
    if data is None:
        return None
    words = [row["body"].decode() for row in data]
    sizes.append(len(words))
    if words[0].startswith("gate "):
        deadline = time.monotonic() + 90
        while not Path(words[0][5:]).exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        return ["open"]
    if words == ["sizes"]:
        return [sizes]
    for idx, word in enumerate(words):
        if word.startswith("["):
            context.set_response_status(400, "Bad Request", idx)
    if any(word.startswith("many ") for word in words) and len(words) > 5:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    for row, word in zip(data, words):
        row.clear()
        if word.startswith("poison "):
            raise ValueError(f"{word} is poison")
    return words
"""


def in_one_batch(
    server, until, tmp_path, words: list[str], path: str = "/predictions/frail"
) -> list[httpx.Response]:
    """The answers to requests that wait together while the worker is held."""
    version = server.registry.models["frail"].versions["1.0"]
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(len(words) + 1) as pool:
        first = pool.submit(server.inference.post, "/predictions/frail", content=f"gate {gate}")
        until(lambda: version.stats.requests == 1 and not version.pending)
        url, headers = (
            f"{server.addresses['inference']}{path}",
            {"content-type": "application/octet-stream"},
        )
        answers = [
            pool.submit(httpx.post, url, content=word, headers=headers, timeout=60)
            for word in words
        ]
        until(lambda: version.stats.requests == 1 + len(words))
        gate.touch()
        assert first.result().text == "open"
        return [answer.result() for answer in answers]


def register(server, config: str = "") -> None:
    server.write_mar("frail.mar", handler=HANDLER, config=f"batchSize: 32\n{config}")
    server.register("frail.mar", initial_workers=1)


def test_one_poisonous_request_in_a_batch_of_32_gets_its_own_error_and_the_31_get_their_answers(
    empty, until, tmp_path, error_of
):
    register(empty)
    words = [f"poison {number}" if number == 20 else f"word {number}" for number in range(32)]
    for number, answer in enumerate(in_one_batch(empty, until, tmp_path, words)):
        if number == 20:
            assert answer.status_code == 500
            assert error_of(answer)[1] == "Prediction failed: ValueError: poison 20 is poison"
        else:
            assert (answer.status_code, answer.text) == (200, words[number])
    sizes = empty.inference.post("/predictions/frail", content="sizes").json()
    assert sizes[:2] == [1, 32]
    assert len(sizes) <= 17


def test_a_model_whose_handler_must_not_be_called_twice_fails_the_batch_whole(
    empty, until, tmp_path
):
    register(empty, "retryFailedBatch: false")
    words = ["poison 0", *["word"] * 31]
    assert {answer.status_code for answer in in_one_batch(empty, until, tmp_path, words)} == {500}
    assert empty.inference.post("/predictions/frail", content="sizes").json() == [1, 32, 1]


def test_an_error_of_a_handler_that_is_nested_without_end_takes_no_other_answer_with_it(
    empty, until, tmp_path
):
    register(empty)
    words = ["word 0", "[" * 50_000, "word 2"]
    answers = in_one_batch(
        empty, until, tmp_path, words, "/v2/models/frail/infer"
    )  # whose errors are looked into
    assert [(answer.status_code, answer.text) for answer in answers] == [
        (200, words[0]),
        (400, words[1]),
        (200, words[2]),
    ]


def test_a_batch_that_does_not_fit_the_device_is_answered_and_metrics_tell(empty, until, tmp_path):
    register(empty)
    words = [f"many {number}" for number in range(32)]
    assert [answer.text for answer in in_one_batch(empty, until, tmp_path, words)] == words
    metrics = empty.metrics.get("/metrics").text
    assert 'ModelName="frail"' in metrics
    for name, value in (("tsx_oom_retries_total", 3), ("tsx_batch_ceiling", 4)):
        (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name}{{")]
        assert 'worker="' in line
        assert float(line.rpartition(" ")[2]) == value
