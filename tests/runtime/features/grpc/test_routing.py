"""Traffic routing over gRPC: by metadata instead of headers; answers name their version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from tests.runtime.features.grpc.conftest import TIMEOUT, Client, failure_of

VERSION_HEADER = "x-tsx-model-version"


@pytest.fixture(scope="module", autouse=True)
def two_versions(client: Client) -> Iterator[None]:
    """Register version 2.0, which gets all requests that no rule or label sends to 1.0."""
    client.manage("RegisterModel", url="talker2.mar", initial_workers=1, synchronous=True)
    traffic = {
        "weights": {"2.0": 1},
        "rules": [{"header": "x-beta", "equals": "0", "to": "1.0"}],
        "labels": {"stable": "1.0", "canary": "2.0", "next": "3.0"},
    }
    put(client, "traffic?force=true", traffic)
    yield
    put(client, "traffic", {})
    client.manage("UnregisterModel", model_name="talker", model_version="2.0")


def put(client: Client, path: str, content: Any) -> None:
    url = f"{client.addresses('models')}/models/talker/{path}"
    httpx.put(url, json=content, timeout=TIMEOUT).raise_for_status()


def version_of(call: Any) -> str | None:
    return dict(call.initial_metadata()).get(VERSION_HEADER)


def test_weights_and_rules_route_calls_and_answers_name_the_version(client: Client) -> None:
    assert version_of(client.ask(do=b"")[1]) == "2.0"
    assert version_of(client.ask(metadata=(("x-beta", "0"),))[1]) == "1.0"
    assert version_of(client.ask(do=b"headers")[1]) == "2.0"


def test_streams_and_refusals_name_the_version(client: Client) -> None:
    call = client.stream(do=b"stream")
    assert b"".join(response.prediction for response in call) == b"abc"
    assert version_of(call) == "2.0"
    error = failure_of(lambda: client.ask(do=b"raise"))
    assert dict(error.trailing_metadata())[VERSION_HEADER] == "2.0"


def test_a_label_can_be_used_as_a_version(client: Client) -> None:
    predict = client.predictions.Predictions
    for label in ("stable", "1.0", "canary"):
        _, call = predict.with_call(client.request(version=label, do=b""), timeout=TIMEOUT)
        assert version_of(call) is None
    error = failure_of(lambda: predict(client.request(version="next"), timeout=TIMEOUT))
    assert "Model version: 3.0 does not exist for model: talker, and the label next" in (
        error.details()
    )
    description = client.manage("DescribeModel", model_name="talker", model_version="canary")
    assert '"modelVersion": "2.0"' in description


def test_open_inference_answers_name_their_version(client: Client) -> None:
    triton = tritonclient.grpc.InferenceServerClient(client.addresses("gRPC predictions"))
    tensor = tritonclient.grpc.InferInput("do", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b""], dtype=object))
    for options, version in (
        ({}, "2.0"),
        ({"headers": {"x-beta": "0"}}, "1.0"),
        ({"model_version": "stable"}, "1.0"),
    ):
        assert triton.infer("talker", [tensor], **options).get_response().model_version == version
    assert triton.is_model_ready("talker", "canary")
    assert list(triton.get_model_metadata("talker", "canary").versions) == ["2.0"]
    triton.close()


def test_calls_are_copied_to_a_shadow(
    client: Client, until: Callable[[Callable[[], object]], None]
) -> None:
    def get(path: str) -> Any:
        url = f"{client.addresses('models')}/models/talker/{path}"
        return httpx.get(url, timeout=TIMEOUT).json()

    traffic = get("traffic")["traffic"]
    put(client, "shadow", {"to": "1.0", "share": 100})
    try:
        assert version_of(client.ask(do=b"bytes")[1]) == "2.0"
        list(client.stream(do=b"stream"))
        until(lambda: (report := get("shadow"))["agreed"] + report["disagreed"] == 2)
    finally:
        put(client, "traffic?force=true", traffic)
