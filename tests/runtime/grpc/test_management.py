"""TorchServe's management service, asked by the client that TorchServe's users have."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from tests.runtime.grpc.conftest import TIMEOUT, Client


def call(client: Client, method: str, **fields: Any) -> str:
    request = getattr(client.management, f"{method}Request")(**fields)
    message: str = getattr(client.models, method)(request, timeout=TIMEOUT).msg
    return message


def refused(client: Client, method: str, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(client, method, **fields)
    return caught.value.code(), caught.value.details()


def test_a_model_is_registered_scaled_made_default_and_removed(client: Client) -> None:
    text = 'Model "talker" Version: 2.0 registered with 0 initial workers. Use scale workers API to add workers for the model.'
    assert call(client, "RegisterModel", url="talker2.mar") == text
    assert (
        call(client, "ScaleWorker", model_name="talker", model_version="2.0", min_worker=1)
        == "Processing worker updates..."
    )
    scaled = call(
        client,
        "ScaleWorker",
        model_name="talker",
        model_version="2.0",
        min_worker=1,
        synchronous=True,
    )
    assert scaled == "Workers scaled to 1 for model: talker, version: 2.0"
    described = json.loads(call(client, "DescribeModel", model_name="talker", model_version="all"))
    assert [(one["modelVersion"], one["minWorkers"]) for one in described] == [
        ("1.0", 1),
        ("2.0", 1),
    ]
    default = call(client, "SetDefault", model_name="talker", model_version="2.0")
    assert default == 'Default version successfully updated for model "talker" to "2.0"'
    code, text = refused(client, "UnregisterModel", model_name="talker")
    assert code == grpc.StatusCode.PERMISSION_DENIED
    assert text.startswith(
        "Cannot remove default version for model talker. Version 2.0 is the default: set another one first "
    )
    call(client, "SetDefault", model_name="talker", model_version="1.0")
    assert (
        call(client, "UnregisterModel", model_name="talker", model_version="2.0")
        == 'Model "talker" unregistered'
    )


def test_by_metadata_a_registration_takes_the_place_of_a_version(client: Client) -> None:
    def register(replace: str) -> str:
        request = client.management.RegisterModelRequest(url="talker2.mar", synchronous=True)
        message: str = client.models.RegisterModel(
            request, metadata=(("x-tsx-replace", replace),), timeout=TIMEOUT
        ).msg
        return message

    call(client, "RegisterModel", url="talker2.mar")
    try:
        text = 'Model "talker" Version: 2.0 has taken the place of version 2.0 with 0 workers'
        assert register("true") == f"{text}. Use scale workers API to add workers for the model."
        for word, code in (
            ("false", grpc.StatusCode.ABORTED),
            ("perhaps", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                register(word)
            assert caught.value.code() == code
        assert "Parameter replace is 'perhaps'" in caught.value.details()
    finally:
        call(client, "UnregisterModel", model_name="talker", model_version="2.0")


def test_models_are_listed_in_the_json_of_rest(client: Client) -> None:
    message = call(client, "ListModels")
    assert json.loads(message) == {"models": [{"modelName": "talker", "modelUrl": "talker.mar"}]}
    assert message.endswith("\n}")


def test_a_handler_is_asked_to_describe_itself(client: Client) -> None:
    described = json.loads(call(client, "DescribeModel", model_name="talker", customized=True))
    assert described[0]["customizedMetadata"]["headers"]["describe"] == "True"


@pytest.mark.parametrize(
    ("method", "fields", "code", "text"),
    [
        (
            "RegisterModel",
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "Parameter url is required.\norg.pytorch.serve.http.BadRequestException",
        ),
        (
            "RegisterModel",
            {"url": "talker.mar"},
            grpc.StatusCode.ABORTED,
            "is already registered for model talker",
        ),
        (
            "RegisterModel",
            {"url": "none.mar"},
            grpc.StatusCode.NOT_FOUND,
            "org.pytorch.serve.archive.model.ModelNotFoundException",
        ),
        (
            "RegisterModel",
            {"url": "../talker.mar"},
            grpc.StatusCode.NOT_FOUND,
            "Relative path is not allowed in url: ../talker.mar",
        ),
        (
            "RegisterModel",
            {"url": "talker.mar", "batch_size": -1},
            grpc.StatusCode.INVALID_ARGUMENT,
            "batch_size",
        ),
        (
            "RegisterModel",
            {"url": "broken.mar", "initial_workers": 1, "synchronous": True},
            grpc.StatusCode.INTERNAL,
            "no_such_module_anywhere",
        ),
        (
            "DescribeModel",
            {"model_name": "nope"},
            grpc.StatusCode.NOT_FOUND,
            "Model not found: nope",
        ),
        (
            "DescribeModel",
            {},
            grpc.StatusCode.NOT_FOUND,
            "Model not found: . The request names no model: set model_name.",
        ),
        (
            "ScaleWorker",
            {},
            grpc.StatusCode.NOT_FOUND,
            "Model not found: . The request names no model: set model_name.",
        ),
        (
            "SetDefault",
            {},
            grpc.StatusCode.NOT_FOUND,
            "Model not found: . The request names no model: set model_name.",
        ),
        (
            "SetDefault",
            {"model_name": "talker"},
            grpc.StatusCode.NOT_FOUND,
            "Model version  does not exist for model talker. ",
        ),
        (
            "UnregisterModel",
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "Parameter model_name is required.",
        ),
        (
            "ScaleWorker",
            {"model_name": "talker", "min_worker": 3, "max_worker": 1},
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_worker cannot be less than min_worker.",
        ),
        (
            "SetDefault",
            {"model_name": "talker", "model_version": "7"},
            grpc.StatusCode.NOT_FOUND,
            "Model version 7 does not exist for model talker",
        ),
        (
            "UnregisterModel",
            {"model_name": "nope"},
            grpc.StatusCode.NOT_FOUND,
            "Model not found: nope",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_rest_s_words(
    client: Client, method: str, fields: dict[str, Any], code: grpc.StatusCode, text: str
) -> None:
    found, details = refused(client, method, **fields)
    assert (found, text in details) == (code, True), details
