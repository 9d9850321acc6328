"""Traffic over gRPC: metadata decides as headers do, and answers tell their version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc

from tests.runtime.grpc.conftest import TIMEOUT, Client

TOLD = "x-tsx-model-version"


@pytest.fixture(scope="module", autouse=True)
def two_versions(client: Client) -> Iterator[None]:
    """2.0 gets everything but what a rule or a label sends to 1.0."""
    management = client.management
    client.models.RegisterModel(
        management.RegisterModelRequest(url="talker2.mar", initial_workers=1, synchronous=True),
        timeout=TIMEOUT,
    )
    address = client.addresses("models")
    rule = {"header": "x-beta", "equals": "0", "to": "1.0"}
    said = {
        "weights": {"2.0": 1},
        "rules": [rule],
        "labels": {"stable": "1.0", "canary": "2.0", "next": "3.0"},
    }
    httpx.put(
        f"{address}/models/talker/traffic?force=true", json=said, timeout=TIMEOUT
    ).raise_for_status()
    yield
    httpx.put(f"{address}/models/talker/traffic", json={}, timeout=TIMEOUT).raise_for_status()
    client.models.UnregisterModel(
        management.UnregisterModelRequest(model_name="talker", model_version="2.0"), timeout=TIMEOUT
    )


def reported(call: Any) -> str | None:
    return dict(call.initial_metadata()).get(TOLD)


def test_weights_and_rules_decide_and_the_answer_says_who_gave_it(client: Client) -> None:
    assert reported(client.ask(do=b"")[1]) == "2.0"
    assert reported(client.ask(metadata=(("x-beta", "0"),))[1]) == "1.0"
    assert reported(client.ask(do=b"headers")[1]) == "2.0"


def test_streams_say_it_too(client: Client) -> None:
    request = client.messages.PredictionsRequest(model_name="talker", input={"do": b"stream"})
    call = client.predictions.StreamPredictions(request, timeout=TIMEOUT)
    assert b"".join(response.prediction for response in call) == b"abc"
    assert reported(call) == "2.0"


def test_a_refusal_says_it_too(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.ask(do=b"raise")
    assert dict(caught.value.trailing_metadata())[TOLD] == "2.0"


def test_a_label_can_be_named_in_place_of_a_version(client: Client) -> None:
    for word in ("stable", "1.0", "canary"):
        request = client.messages.PredictionsRequest(
            model_name="talker", model_version=word, input={"do": b""}
        )
        _, call = client.predictions.Predictions.with_call(request, timeout=TIMEOUT)
        assert reported(call) is None
    with pytest.raises(grpc.RpcError) as caught:
        client.predictions.Predictions(
            client.messages.PredictionsRequest(model_name="talker", model_version="next"),
            timeout=TIMEOUT,
        )
    assert (
        "Model version: 3.0 does not exist for model: talker, and the label next means it"
        in caught.value.details()
    )
    described = client.models.DescribeModel(
        client.management.DescribeModelRequest(model_name="talker", model_version="canary"),
        timeout=TIMEOUT,
    )
    assert '"modelVersion": "2.0"' in described.msg


def test_the_open_inference_protocol_names_the_version_that_answered(client: Client) -> None:
    triton = tritonclient.grpc.InferenceServerClient(client.addresses("gRPC predictions"))
    tensor = tritonclient.grpc.InferInput("do", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b""], dtype=object))
    assert triton.infer("talker", [tensor]).get_response().model_version == "2.0"
    assert (
        triton.infer("talker", [tensor], headers={"x-beta": "0"}).get_response().model_version
        == "1.0"
    )
    assert (
        triton.infer("talker", [tensor], model_version="stable").get_response().model_version
        == "1.0"
    )
    assert triton.is_model_ready("talker", "canary")
    assert list(triton.get_model_metadata("talker", "canary").versions) == ["2.0"]
    triton.close()


def test_calls_are_copied_to_a_shadow_as_well(
    client: Client, until: Callable[[Callable[[], object]], None]
) -> None:
    address = client.addresses("models")
    traffic = httpx.get(f"{address}/models/talker/traffic", timeout=TIMEOUT).json()["traffic"]
    httpx.put(
        f"{address}/models/talker/shadow", json={"to": "1.0", "share": 100}, timeout=TIMEOUT
    ).raise_for_status()
    try:
        assert reported(client.ask(do=b"bytes")[1]) == "2.0"
        list(
            client.predictions.StreamPredictions(
                client.messages.PredictionsRequest(model_name="talker", input={"do": b"stream"})
            )
        )

        def compared() -> bool:
            report = httpx.get(f"{address}/models/talker/shadow", timeout=TIMEOUT).json()
            return bool(report["agreed"] + report["disagreed"] == 2)

        until(compared)
    finally:
        httpx.put(
            f"{address}/models/talker/traffic?force=true", json=traffic, timeout=TIMEOUT
        ).raise_for_status()
