"""TorchServe's management service, called with the client that users of TorchServe have."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from tests.runtime.features.grpc.conftest import Client, failure_of

TALKER_2 = {"model_name": "talker", "model_version": "2.0"}


def test_a_model_is_registered_scaled_set_as_default_and_removed(client: Client) -> None:
    text = client.manage("RegisterModel", url="talker2.mar")
    assert text.startswith('Model "talker" Version: 2.0 registered with 0 initial workers.')
    text = client.manage("ScaleWorker", **TALKER_2, min_worker=1)
    assert text == "Processing worker updates..."
    text = client.manage("ScaleWorker", **TALKER_2, min_worker=1, synchronous=True)
    assert text == "Workers scaled to 1 for model: talker, version: 2.0"
    description = client.manage("DescribeModel", model_name="talker", model_version="all")
    assert [
        (version["modelVersion"], version["minWorkers"]) for version in json.loads(description)
    ] == [("1.0", 1), ("2.0", 1)]
    text = client.manage("SetDefault", **TALKER_2)
    assert text == 'Default version successfully updated for model "talker" to "2.0"'
    error = failure_of(lambda: client.manage("UnregisterModel", model_name="talker"))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "Version 2.0 is the default" in error.details()
    client.manage("SetDefault", model_name="talker", model_version="1.0")
    assert client.manage("UnregisterModel", **TALKER_2) == 'Model "talker" unregistered'


def test_a_registration_with_replace_metadata_replaces_a_version(client: Client) -> None:
    def register(replace: str) -> str:
        metadata = (("x-tsx-replace", replace),)
        return client.manage("RegisterModel", metadata, url="talker2.mar", synchronous=True)

    client.manage("RegisterModel", url="talker2.mar")
    try:
        text = 'Model "talker" Version: 2.0 has taken the place of version 2.0 with 0 workers'
        assert register("true").startswith(text)
        assert failure_of(lambda: register("false")).code() is grpc.StatusCode.ABORTED
        error = failure_of(lambda: register("perhaps"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "replace is 'perhaps'" in error.details()
    finally:
        client.manage("UnregisterModel", **TALKER_2)


def test_models_are_listed_in_rests_json(client: Client) -> None:
    message = client.manage("ListModels")
    assert json.loads(message) == {"models": [{"modelName": "talker", "modelUrl": "talker.mar"}]}
    assert message.endswith("\n}")


def test_a_description_can_include_the_handlers_own(client: Client) -> None:
    text = client.manage("DescribeModel", model_name="talker", customized=True)
    assert json.loads(text)[0]["customizedMetadata"]["headers"]["describe"] == "True"


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
NAMELESS = "Model not found: . The request names no model: set model_name."
TALKER = {"model_name": "talker"}
URL = {"url": "talker.mar"}
FAILING = {"url": "broken.mar", "initial_workers": 1, "synchronous": True}


@pytest.mark.parametrize(
    ("method", "fields", "code", "text"),
    [
        ("RegisterModel", {}, INVALID, "Parameter url is required.\norg.pytorch.serve.http.BadReq"),
        ("RegisterModel", URL, grpc.StatusCode.ABORTED, "is already registered for model talker"),
        ("RegisterModel", {"url": "none.mar"}, NOT_FOUND, "archive.model.ModelNotFoundException"),
        ("RegisterModel", {"url": "../talker.mar"}, NOT_FOUND, "in url: ../talker.mar"),
        ("RegisterModel", {**URL, "batch_size": -1}, INVALID, "batch_size"),
        ("RegisterModel", FAILING, grpc.StatusCode.INTERNAL, "no_such_module_anywhere"),
        ("DescribeModel", {"model_name": "nope"}, NOT_FOUND, "Model not found: nope"),
        ("DescribeModel", {}, NOT_FOUND, NAMELESS),
        ("ScaleWorker", {}, NOT_FOUND, NAMELESS),
        ("ScaleWorker", {**TALKER, "min_worker": 3, "max_worker": 1}, INVALID, "max_worker cannot"),
        ("SetDefault", {}, NOT_FOUND, NAMELESS),
        ("SetDefault", TALKER, NOT_FOUND, "Model version  does not exist for model talker. "),
        ("SetDefault", {**TALKER, "model_version": "7"}, NOT_FOUND, "Model version 7 does not"),
        ("UnregisterModel", {}, INVALID, "Parameter model_name is required."),
        ("UnregisterModel", {"model_name": "nope"}, NOT_FOUND, "Model not found: nope"),
    ],
)
def test_invalid_calls_are_refused_with_rests_messages(
    client: Client, method: str, fields: dict[str, Any], code: grpc.StatusCode, text: str
) -> None:
    error = failure_of(lambda: client.manage(method, **fields))
    assert (error.code(), text in error.details()) == (code, True), error.details()
