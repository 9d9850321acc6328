"""TorchServe's inference service, called with the client that users of TorchServe have.

`tests/runtime/test_conformance.py` tests plain answers and refusals for all targets.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from google.protobuf.empty_pb2 import Empty

from tests.runtime.features.grpc.conftest import TIMEOUT, Client, failure_of
from tsx_runtime.features.grpc.inference import MAX_REQUESTS_AHEAD

PRIORITY = (("x-tsx-priority", "1"),)
Until = Callable[[Callable[[], object]], None]


def wait_inputs(directory: Path) -> dict[str, bytes]:
    """Return the inputs of a request that creates the file `begun` and waits for the file `go`."""
    begun_file, file = (str(directory / name).encode() for name in ("begun", "go"))
    return {"do": b"wait", "begun": begun_file, "file": file}


@contextmanager
def busy_worker(client: Client, directory: Path, until: Until) -> Iterator[None]:
    """Keep the only worker busy.

    Requests with a deadline or priority wait in the queue; one other may already be at the worker.
    """
    answer = client.start(**wait_inputs(directory))
    until((directory / "begun").exists)
    try:
        yield
    finally:
        (directory / "go").touch()
    assert answer.result(TIMEOUT).prediction == b"waited"


def test_ping_has_the_body_of_rest(client: Client) -> None:
    assert client.predictions.Ping(Empty(), timeout=TIMEOUT).health == '{\n  "status": "Healthy"\n}'


def test_a_handler_gets_named_inputs_and_metadata_as_headers(client: Client) -> None:
    metadata = (("x-mine", "1"), ("x-raw-bin", b"\x00\xff"))
    prediction, call = client.ask(metadata=metadata, data=b"\x00\xffabc", other=b"{}")
    request = json.loads(prediction)
    assert request["row"] == {"data": "\x00\xffabc", "other": "{}"}
    assert request["headers"]["x-mine"] == "1"
    assert request["headers"]["x-raw-bin"] == "AP8="
    assert [key for key, _ in call.trailing_metadata()] == ["x-request-id"]
    assert call.initial_metadata() == ()
    assert json.loads(client.ask()[0])["row"] == {}


def test_metadata_with_underscores_cannot_imitate_proxy_headers(client: Client) -> None:
    forged_names = ("proxy_authorization", "x_forwarded_for", "content_type", "cookie", "x_user")
    prediction, _ = client.ask(metadata=[(name, "planted") for name in forged_names])
    headers = json.loads(prediction)["headers"]
    assert [name for name, value in headers.items() if value == "planted"] == ["x_user"]


def test_headers_and_status_of_a_handler_become_metadata(client: Client) -> None:
    prediction, call = client.ask(do=b"headers")
    headers = dict(call.initial_metadata())
    assert prediction == b"a,b"
    assert (headers["x-own"], headers["x-name"]) == ("1", "caf%C3%A9")
    assert headers["x-request-id"] == dict(call.trailing_metadata())["x-request-id"]
    assert not any(key.startswith("content-") for key in headers)
    prediction, call = client.ask(do=b"status")
    assert (prediction, dict(call.initial_metadata())["x-http-status"]) == (b"body of it", "507")


def test_an_equal_request_is_answered_from_the_reply_cache(client: Client) -> None:
    client.manage("RegisterModel", url="cached.mar", initial_workers=1, synchronous=True)
    answers = [client.ask("cached", data=data) for data in (b"a", b"a", b"b")]
    client.manage("UnregisterModel", model_name="cached")
    assert [
        (prediction, dict(call.initial_metadata()).get("x-cache")) for prediction, call in answers
    ] == [(b"1", None), (b"1", "hit"), (b"2", None)]


def test_refusals_have_torchserves_exception_names_and_the_request_id(client: Client) -> None:
    assert failure_of(lambda: client.ask("nope")).details() == (
        "Model not found: nope\norg.pytorch.serve.archive.model.ModelNotFoundException"
    )
    predict, request = client.predictions.Predictions, client.request(version="9")
    assert failure_of(lambda: predict(request, timeout=TIMEOUT)).details() == (
        "Model version: 9 does not exist for model: talker\n"
        "org.pytorch.serve.archive.model.ModelVersionNotFoundException"
    )
    error = failure_of(lambda: client.ask(do=b"raise"))
    assert error.details() == (
        "Prediction failed: RuntimeError: no such image\n"
        "org.pytorch.serve.http.InternalServerException"
    )
    assert "x-request-id" in dict(error.trailing_metadata())


def test_large_messages_pass_and_too_large_ones_are_refused(client: Client) -> None:
    body = bytes(range(256)) * 60_000
    assert client.ask(do=b"large", data=body)[0] == body
    refusal = failure_of(lambda: client.ask(do=b"large", data=body + body))
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_client_may_compress_its_messages(client: Client) -> None:
    body = b"a" * 1_000_000
    answer = client.predictions.Predictions(
        client.request(do=b"large", data=body), compression=grpc.Compression.Gzip, timeout=TIMEOUT
    )
    assert answer.prediction == body


def test_a_stream_delivers_each_part_as_it_arrives(client: Client) -> None:
    assert [part.prediction for part in client.stream(do=b"stream")] == [b"a", b"b", b"", b"c"]
    assert client.ask(do=b"stream")[0] == b"abc"
    large_stream = client.stream(do=b"large", data=b"whole")
    assert [part.prediction for part in large_stream] == [b"whole"]


def test_a_stream_that_breaks_off_ends_with_an_error(client: Client) -> None:
    error = failure_of(lambda: list(client.stream(do=b"stream-fails")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "in the middle" in error.details()


def test_requests_over_one_stream_are_answered_in_order_despite_failures(client: Client) -> None:
    answers = list(
        client.converse(
            client.request(sequence="s", do=b"large", data=b"1"),
            client.request("nope", sequence="s"),
            client.request(do=b"stream"),
            client.request(sequence="s", do=b"raise"),
            client.request(sequence="s", do=b"large", data=b"2"),
        )
    )
    predictions = [b"1", b"", b"a", b"b", b"", b"c", b"", b"2"]
    assert [answer.prediction for answer in answers] == predictions
    assert [answer.status.code for answer in answers] == [0, 13, 0, 0, 0, 0, 13, 0]
    assert "Model not found: nope" in answers[1].status.message
    assert [answer.sequence_id for answer in answers] == ["s", "s", "", "", "", "", "s", "s"]
    assert not answers[2].HasField("sequence_id")


def test_a_client_that_cancels_frees_its_place_in_the_queue(
    client: Client, tmp_path: Path, until: Until
) -> None:
    with busy_worker(client, tmp_path, until):
        waiting_call = client.start(metadata=PRIORITY, data=b"x")
        until(lambda: client.count_pending() == 1)
        waiting_call.cancel()
        until(lambda: client.count_pending() == 0)


def test_the_deadline_of_a_call_applies_to_its_request(
    client: Client, tmp_path: Path, until: Until
) -> None:
    with busy_worker(client, tmp_path, until):
        error = failure_of(lambda: client.ask(data=b"x", timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: client.count_pending() == 0)


def test_a_deadline_applies_to_a_running_request(
    client: Client, tmp_path: Path, until: Until
) -> None:
    metadata = [("x-tsx-timeout-ms", "700")]
    try:
        error = failure_of(lambda: client.ask(metadata=metadata, **wait_inputs(tmp_path)))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "before its deadline" in error.details()
        # The handler waits for a file that is not there yet.
        until((tmp_path / "begun").exists)
    finally:
        (tmp_path / "go").touch()
    assert client.ask(data=b"x")[0]


def test_a_stream_whose_client_leaves_frees_all_its_places(
    client: Client, tmp_path: Path, until: Until
) -> None:
    with busy_worker(client, tmp_path, until):
        requests = [client.request(data=b"x") for _ in range(MAX_REQUESTS_AHEAD + 5)]
        answers = client.converse(*requests, metadata=PRIORITY)
        until(lambda: client.count_pending() == MAX_REQUESTS_AHEAD)
        answers.cancel()
        until(lambda: client.count_pending() == 0)


def test_sequence_fields_reach_the_handler_as_headers(client: Client) -> None:
    answers = client.converse(
        client.request(sequence="s1", data=b"1"),
        client.request(sequence="s2", data=b"2"),
        client.request(sequence="s1", data=b"3", ts_request_sequence_end=b"true\r\nx-other: 1"),
    )
    headers = [json.loads(answer.prediction)["headers"] for answer in answers]
    prefix = "ts_request_sequence_"
    assert [
        {name: value for name, value in block.items() if name.startswith(prefix)}
        for block in headers
    ] == [
        {f"{prefix}id": "s1", f"{prefix}start": "true"},
        {f"{prefix}id": "s2", f"{prefix}start": "true"},
        {f"{prefix}id": "s1", f"{prefix}end": "true"},
    ]
    assert not any("x-other" in block for block in headers)


def test_calls_are_counted_like_rest_requests(client: Client, until: Until) -> None:
    def count_answers() -> list[int]:
        """Return the counts of 2XX, 4XX and 5XX; this metrics request itself counts as one 2XX."""
        url = f"{client.addresses('metrics')}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            text = answer.read().decode()
        matches = (re.search(rf"^Requests{digit}XX{{.*}} (\d+)", text, re.M) for digit in "245")
        return [int(match[1]) for match in matches if match]

    counts_before = count_answers()
    client.ask()
    # A status that the handler sets does not fail the call.
    client.ask(do=b"status")
    failure_of(lambda: client.ask("nope"))
    failure_of(lambda: client.ask(do=b"raise"))
    failure_of(lambda: list(client.stream("nope")))
    successes, refusals, failures = counts_before
    until(lambda: count_answers()[1:] == [refusals + 2, failures + 1])
    assert count_answers()[0] >= successes + 3


def test_a_stream_may_have_more_requests_than_the_queue_holds(client: Client) -> None:
    bodies = [b"%d" % number for number in range(3 * MAX_REQUESTS_AHEAD)]
    answers = client.converse(*(client.request(do=b"large", data=body) for body in bodies))
    assert [answer.prediction for answer in answers] == bodies


def test_a_client_that_reads_nothing_does_not_block_the_model(client: Client) -> None:
    """Check `write_timeout`, 2 s; without it the only worker would wait for this client forever."""
    stream = client.stream(do=b"flood")
    next(stream)
    assert b"row" in client.ask()[0]
    error = failure_of(lambda: list(stream))
    assert error.code() is grpc.StatusCode.ABORTED
    assert "read nothing of the answer for 2 s" in error.details()


def test_a_joined_stream_has_the_size_limit_of_one_answer(client: Client) -> None:
    error = failure_of(lambda: client.ask(do=b"flood"))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "20000000 bytes together (max_response_size)" in error.details()
    assert b"row" in client.ask()[0]
