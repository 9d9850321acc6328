"""TorchServe's inference service, asked by the client that TorchServe's users have."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.runtime.grpc.conftest import TIMEOUT, Client
from tsx_runtime.grpc.inference import AHEAD


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


RANKED = (("x-tsx-priority", "1"),)


@contextmanager
def busy(
    client: Client, directory: Path, until: Callable[[Callable[[], object]], None]
) -> Iterator[None]:
    """The only worker is at work.

    What has a deadline or a priority waits; of others, one may be with it already.
    """
    begun, file = directory / "begun", directory / "go"
    request = client.messages.PredictionsRequest(
        model_name="talker",
        input={"do": b"wait", "begun": str(begun).encode(), "file": str(file).encode()},
    )
    answer: Future[Any] = client.predictions.Predictions.future(request, timeout=TIMEOUT)
    until(begun.exists)
    try:
        yield
    finally:
        file.touch()
    assert answer.result(TIMEOUT).prediction == b"waited"


def test_ping_says_what_rest_says(client: Client) -> None:
    from google.protobuf.empty_pb2 import Empty

    assert client.predictions.Ping(Empty(), timeout=TIMEOUT).health == '{\n  "status": "Healthy"\n}'


def test_a_handler_finds_each_input_under_its_name_and_metadata_among_the_headers(
    client: Client,
) -> None:
    metadata = (("x-mine", "1"), ("x-raw-bin", b"\x00\xff"))
    prediction, call = client.ask(metadata=metadata, data=b"\x00\xffabc", other=b"{}")
    said = json.loads(prediction)
    assert said["row"] == {"data": "\x00\xffabc", "other": "{}"}
    assert said["headers"]["x-mine"] == "1"
    assert said["headers"]["x-raw-bin"] == "AP8="
    assert [key for key, _ in call.trailing_metadata()] == ["x-request-id"]
    assert call.initial_metadata() == ()


def test_no_underscore_makes_metadata_that_a_server_or_proxy_sets(client: Client) -> None:
    planted = ("proxy_authorization", "x_forwarded_for", "content_type", "cookie", "x_user")
    prediction, _ = client.ask(metadata=[(name, "planted") for name in planted])
    assert [
        name for name, value in json.loads(prediction)["headers"].items() if value == "planted"
    ] == ["x_user"]


def test_a_request_without_inputs_is_an_empty_row(client: Client) -> None:
    assert json.loads(client.ask()[0])["row"] == {}


def test_what_a_handler_says_beside_its_answer_is_metadata(client: Client) -> None:
    prediction, call = client.ask(do=b"headers")
    reported = dict(call.initial_metadata())
    assert prediction == b"a,b"
    assert reported["x-own"] == "1"
    assert reported["x-name"] == "caf%C3%A9"
    assert reported["x-request-id"] == dict(call.trailing_metadata())["x-request-id"]
    assert not any(key.startswith("content-") for key in reported)


def test_an_equal_request_is_answered_from_the_reply_cache(client: Client) -> None:
    order = client.management.RegisterModelRequest(
        url="cached.mar", initial_workers=1, synchronous=True
    )
    client.models.RegisterModel(order, timeout=TIMEOUT)
    asked = [client.ask("cached", data=data) for data in (b"a", b"a", b"b")]
    client.models.UnregisterModel(
        client.management.UnregisterModelRequest(model_name="cached"), timeout=TIMEOUT
    )
    assert [prediction for prediction, _ in asked] == [b"1", b"1", b"2"]
    assert [dict(call.initial_metadata()).get("x-cache") for _, call in asked] == [
        None,
        "hit",
        None,
    ]


def test_a_status_that_a_handler_sets_ends_no_call(client: Client) -> None:
    prediction, call = client.ask(do=b"status")
    assert (prediction, dict(call.initial_metadata())["x-http-status"]) == (b"body of it", "507")


def test_refusals_have_torchserve_s_codes_and_name_its_classes(client: Client) -> None:
    assert refused(lambda: client.ask("nope")) == (
        grpc.StatusCode.INTERNAL,
        "Model not found: nope\norg.pytorch.serve.archive.model.ModelNotFoundException",
    )
    request = client.messages.PredictionsRequest(model_name="talker", model_version="9")
    assert refused(lambda: client.predictions.Predictions(request, timeout=TIMEOUT)) == (
        grpc.StatusCode.INTERNAL,
        "Model version: 9 does not exist for model: talker\norg.pytorch.serve.archive.model.ModelVersionNotFoundException",
    )
    code, text = refused(lambda: client.ask(do=b"raise"))
    assert code is grpc.StatusCode.INTERNAL
    assert (
        text
        == "Prediction failed: RuntimeError: no such image\norg.pytorch.serve.http.InternalServerException"
    )
    code, text = refused(lambda: client.ask(metadata=(("x-tsx-priority", "high"),)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-tsx-priority is 'high'" in text


def test_an_error_names_the_request_for_whoever_reads_the_log(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.ask(do=b"raise")
    assert "x-request-id" in dict(caught.value.trailing_metadata())


def test_large_messages_come_and_go_unharmed_and_too_large_ones_are_refused(client: Client) -> None:
    body = bytes(range(256)) * 60_000
    assert client.ask(do=b"large", data=body)[0] == body
    assert (
        refused(lambda: client.ask(do=b"large", data=body + body))[0]
        is grpc.StatusCode.RESOURCE_EXHAUSTED
    )


def test_a_stream_brings_each_part_as_it_comes(client: Client) -> None:
    request = client.messages.PredictionsRequest(model_name="talker", input={"do": b"stream"})
    parts = client.predictions.StreamPredictions(request, timeout=TIMEOUT)
    assert [part.prediction for part in parts] == [b"a", b"b", b"", b"c"]
    assert client.ask(do=b"stream")[0] == b"abc"


def test_a_handler_that_does_not_stream_answers_a_stream_with_one_part(client: Client) -> None:
    request = client.messages.PredictionsRequest(
        model_name="talker", input={"do": b"large", "data": b"whole"}
    )
    assert [
        part.prediction for part in client.predictions.StreamPredictions(request, timeout=TIMEOUT)
    ] == [b"whole"]


def test_a_stream_that_breaks_off_ends_with_an_error(client: Client) -> None:
    request = client.messages.PredictionsRequest(model_name="talker", input={"do": b"stream-fails"})
    parts = []
    with pytest.raises(grpc.RpcError) as caught:
        parts.extend(
            part.prediction
            for part in client.predictions.StreamPredictions(request, timeout=TIMEOUT)
        )
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "in the middle" in caught.value.details()


def test_requests_over_one_stream_are_answered_in_order_and_one_that_fails_ends_nothing(
    client: Client,
) -> None:
    make = client.messages.PredictionsRequest
    requests = [
        make(model_name="talker", sequence_id="s", input={"do": b"large", "data": b"1"}),
        make(model_name="nope", sequence_id="s"),
        make(model_name="talker", input={"do": b"stream"}),
        make(model_name="talker", sequence_id="s", input={"do": b"raise"}),
        make(model_name="talker", sequence_id="s", input={"do": b"large", "data": b"2"}),
    ]
    answers = list(client.predictions.StreamPredictions2(iter(requests), timeout=TIMEOUT))
    assert [answer.prediction for answer in answers] == [
        b"1",
        b"",
        b"a",
        b"b",
        b"",
        b"c",
        b"",
        b"2",
    ]
    assert [answer.status.code for answer in answers] == [0, 13, 0, 0, 0, 0, 13, 0]
    assert "Model not found: nope" in answers[1].status.message
    assert [answer.sequence_id for answer in answers] == ["s", "s", "", "", "", "", "s", "s"]
    assert not answers[2].HasField("sequence_id")


def test_a_client_that_cancels_leaves_its_place_in_the_queue(
    client: Client, tmp_path: Path, until: Any
) -> None:
    with busy(client, tmp_path, until):
        request = client.messages.PredictionsRequest(model_name="talker", input={"data": b"x"})
        waiting = client.predictions.Predictions.future(request, metadata=RANKED, timeout=TIMEOUT)
        until(lambda: client.pending() == 1)
        waiting.cancel()
        until(lambda: client.pending() == 0)


def test_a_call_s_deadline_is_its_request_s(client: Client, tmp_path: Path, until: Any) -> None:
    with busy(client, tmp_path, until):
        code, _ = refused(lambda: client.ask(data=b"x", timeout=0.5))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: client.pending() == 0)


def test_a_deadline_holds_for_a_request_that_runs(
    client: Client, tmp_path: Path, until: Any
) -> None:
    begun, file = tmp_path / "begun", tmp_path / "go"
    inputs = {"do": b"wait", "begun": str(begun).encode(), "file": str(file).encode()}
    try:
        code, text = refused(lambda: client.ask(metadata=[("x-tsx-timeout-ms", "700")], **inputs))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "before its deadline" in text
        until(begun.exists)  # the handler waits for the file, which is not there yet
    finally:
        file.touch()
    assert client.ask(data=b"x")[0]


def test_a_stream_whose_client_leaves_gives_up_all_its_places(
    client: Client, tmp_path: Path, until: Any
) -> None:
    with busy(client, tmp_path, until):
        requests = [
            client.messages.PredictionsRequest(model_name="talker", input={"data": b"x"})
            for _ in range(AHEAD + 5)
        ]
        answers = client.predictions.StreamPredictions2(
            iter(requests), metadata=RANKED, timeout=TIMEOUT
        )
        until(lambda: client.pending() == AHEAD)
        answers.cancel()
        until(lambda: client.pending() == 0)


def test_a_sequence_and_its_marks_reach_the_handler_as_headers(client: Client) -> None:
    make = client.messages.PredictionsRequest
    last = {"data": b"3", "ts_request_sequence_end": b"true\r\nx-other: 1"}
    requests = [
        make(model_name="talker", sequence_id="s1\r\nx-other: 1", input={"data": b"0"}),
        make(model_name="talker", sequence_id="s1", input={"data": b"1"}),
        make(model_name="talker", sequence_id="s2", input={"data": b"2"}),
        make(model_name="talker", sequence_id="s1", input=last),
    ]
    refused, *answers = client.predictions.StreamPredictions2(iter(requests), timeout=TIMEOUT)
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    headers = [json.loads(answer.prediction)["headers"] for answer in answers]
    marks = [
        {name: value for name, value in said.items() if name.startswith("ts_request_sequence_")}
        for said in headers
    ]
    assert marks[0] == {"ts_request_sequence_id": "s1", "ts_request_sequence_start": "true"}
    assert marks[1] == {"ts_request_sequence_id": "s2", "ts_request_sequence_start": "true"}
    assert marks[2] == {"ts_request_sequence_id": "s1", "ts_request_sequence_end": "true"}
    assert not any("x-other" in said for said in headers)


def test_a_request_alone_may_belong_to_a_sequence(client: Client) -> None:
    request = client.messages.PredictionsRequest(
        model_name="talker", sequence_id="s", input={"data": b"1"}
    )
    response = client.predictions.Predictions(request, timeout=TIMEOUT)
    assert response.sequence_id == "s"
    assert json.loads(response.prediction)["headers"]["ts_request_sequence_id"] == "s"
    alone = client.predictions.Predictions(
        client.messages.PredictionsRequest(model_name="talker"), timeout=TIMEOUT
    )
    assert not alone.HasField("sequence_id")


def test_calls_are_counted_as_rest_counts_its_requests(
    client: Client, until: Callable[[Callable[[], object]], None]
) -> None:
    def counted() -> tuple[int, int, int]:
        with urllib.request.urlopen(
            f"{client.addresses('metrics')}/metrics", timeout=TIMEOUT
        ) as answer:
            text = answer.read().decode()
        found = [
            re.search(rf"^Requests{digit}XX{{.*}} (\d+)", text, re.MULTILINE) for digit in "245"
        ]
        return tuple(int(match[1]) for match in found if match)  # type: ignore[return-value]  # there are three

    before = counted()  # which is itself counted once it is told
    client.ask()
    client.ask(do=b"status")  # the handler's own 507 ends no call
    refused(lambda: client.ask("nope"))
    refused(lambda: client.ask(do=b"raise"))
    refused(
        lambda: list(
            client.predictions.StreamPredictions(
                client.messages.PredictionsRequest(model_name="nope"), timeout=TIMEOUT
            )
        )
    )
    until(lambda: [now - then for now, then in zip(counted(), before, strict=True)][1:] == [2, 1])
    assert counted()[0] >= before[0] + 3


def test_a_client_may_compress_what_it_sends(client: Client) -> None:
    body = b"a" * 1_000_000
    request = client.messages.PredictionsRequest(
        model_name="talker", input={"do": b"large", "data": body}
    )
    assert (
        client.predictions.Predictions(
            request, compression=grpc.Compression.Gzip, timeout=TIMEOUT
        ).prediction
        == body
    )
    bomb = client.messages.PredictionsRequest(
        model_name="talker", input={"do": b"large", "data": b"a" * 30_000_000}
    )
    code, _ = refused(
        lambda: client.predictions.Predictions(
            bomb, compression=grpc.Compression.Gzip, timeout=TIMEOUT
        )
    )
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_what_is_no_message_is_refused(client: Client) -> None:
    call = client.inference_channel.unary_unary(
        "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    )
    code, _ = refused(lambda: call(b"\xff\xff\xff\xff", timeout=TIMEOUT))
    assert code in (
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNKNOWN,
    )
    assert client.ask(do=b"large", data=b"still there")[0] == b"still there"
    unknown = client.inference_channel.unary_unary(
        "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Nothing"
    )
    assert refused(lambda: unknown(b"", timeout=TIMEOUT))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_more_requests_than_may_wait_over_one_stream_are_all_answered(client: Client) -> None:
    make = client.messages.PredictionsRequest
    requests = [
        make(model_name="talker", input={"do": b"large", "data": b"%d" % number})
        for number in range(3 * AHEAD)
    ]
    answers = client.predictions.StreamPredictions2(iter(requests), timeout=TIMEOUT)
    assert [answer.prediction for answer in answers] == [
        b"%d" % number for number in range(3 * AHEAD)
    ]


def test_a_client_that_takes_nothing_of_its_stream_does_not_hold_the_model(client: Client) -> None:
    """2 s of write_timeout; without it the only worker would wait for this client for ever."""
    request = client.messages.PredictionsRequest(model_name="talker", input={"do": b"flood"})
    stream = client.predictions.StreamPredictions(request, timeout=TIMEOUT)
    next(stream)
    assert b"row" in client.ask()[0]
    with pytest.raises(grpc.RpcError) as broken:
        list(stream)
    assert broken.value.code() is grpc.StatusCode.ABORTED
    assert "read nothing of the answer for 2 s" in broken.value.details()


def test_a_stream_that_is_asked_for_as_a_whole_keeps_to_the_size_of_an_answer_and_is_stopped(
    client: Client,
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.ask(do=b"flood")
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    assert "more than 20000000 bytes together (max_response_size)" in refused.value.details()
    assert b"row" in client.ask()[0]
