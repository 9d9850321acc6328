"""Failing batches in a real worker: each client gets the answer to its own request."""

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
    server, until, tmp_path, bodies: list[str], path: str = "/predictions/frail"
) -> list[httpx.Response]:
    """Return the answers to requests that form one batch, since the worker is busy at first."""
    version = server.registry.models["frail"].versions["1.0"]
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        first = pool.submit(server.inference.post, "/predictions/frail", content=f"gate {gate}")
        until(lambda: version.stats.requests == 1 and not version.pending)
        url, headers = (
            f"{server.addresses['inference']}{path}",
            {"content-type": "application/octet-stream"},
        )
        answers = [
            pool.submit(httpx.post, url, content=body, headers=headers, timeout=60)
            for body in bodies
        ]
        until(lambda: version.stats.requests == 1 + len(bodies))
        gate.touch()
        assert first.result().text == "open"
        return [answer.result() for answer in answers]


def register(server, config: str = "") -> None:
    server.write_mar("frail.mar", handler=HANDLER, config=f"batchSize: 32\n{config}")
    server.register("frail.mar", initial_workers=1)


def test_one_bad_request_in_a_batch_of_32_fails_alone(empty, until, tmp_path, error_of):
    register(empty)
    bodies = [f"poison {number}" if number == 20 else f"word {number}" for number in range(32)]
    for number, answer in enumerate(in_one_batch(empty, until, tmp_path, bodies)):
        if number == 20:
            assert answer.status_code == 500
            assert error_of(answer)[1] == "Prediction failed: ValueError: poison 20 is poison"
        else:
            assert (answer.status_code, answer.text) == (200, bodies[number])
    sizes = empty.inference.post("/predictions/frail", content="sizes").json()
    assert sizes[:2] == [1, 32]
    assert len(sizes) <= 17


def test_without_retries_one_bad_request_fails_the_whole_batch(empty, until, tmp_path):
    register(empty, "retryFailedBatch: false")
    bodies = ["poison 0", *["word"] * 31]
    assert {answer.status_code for answer in in_one_batch(empty, until, tmp_path, bodies)} == {500}
    assert empty.inference.post("/predictions/frail", content="sizes").json() == [1, 32, 1]


def test_a_deeply_nested_handler_error_fails_no_other_request(empty, until, tmp_path):
    register(empty)
    bodies = ["word 0", "[" * 50_000, "word 2"]
    # This protocol parses the errors of handlers.
    answers = in_one_batch(empty, until, tmp_path, bodies, "/v2/models/frail/infer")
    assert [(answer.status_code, answer.text) for answer in answers] == [
        (200, bodies[0]),
        (400, bodies[1]),
        (200, bodies[2]),
    ]


def test_a_batch_that_exceeds_device_memory_is_split_and_counted(empty, until, tmp_path):
    register(empty)
    bodies = [f"many {number}" for number in range(32)]
    assert [answer.text for answer in in_one_batch(empty, until, tmp_path, bodies)] == bodies
    metrics = empty.metrics.get("/metrics").text
    assert 'ModelName="frail"' in metrics
    for name, value in (("tsx_oom_retries_total", 3), ("tsx_batch_ceiling", 4)):
        (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name}{{")]
        assert 'worker="' in line
        assert float(line.rpartition(" ")[2]) == value
