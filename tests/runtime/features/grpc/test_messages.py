"""Messages that are refused before they are parsed or converted for a worker."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from tsx_runtime.errors import BadRequest, PayloadTooLarge
from tsx_runtime.features.grpc.messages import MAX_FIELDS, decompress, read_message
from tsx_runtime.features.grpc.server import build_channel_options
from tsx_runtime.features.grpc.tensors import pack
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest
from tsx_runtime.grpc.protos.inference_pb2 import PredictionsRequest
from tsx_runtime.settings.schema import Settings

MAX_BYTES = 10_000_000
MANY_FIELDS = 30_000


def read(kind: Any, raw: bytes, max_bytes: int = MAX_BYTES) -> Any:
    return asyncio.run(read_message(kind, raw, max_bytes))


def many_parameters() -> ModelInferRequest:
    request = ModelInferRequest()
    for number in range(MAX_FIELDS):
        request.parameters[str(number)].bool_param = True
    return request


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    [
        PredictionsRequest(input={str(number): b"" for number in range(MANY_FIELDS)}),
        ModelInferRequest(inputs=[{"contents": {"bytes_contents": [b""] * MANY_FIELDS}}]),
        many_parameters(),
        *(b"%c\x00" % tag * MANY_FIELDS for tag in b"\x2a\x32\x3a"),
        b"\x0b" * 100_000,
    ],
    ids=["map of inputs", "strings", "parameters", "tensors", "outputs", "raw contents", "groups"],
)
def test_a_message_with_too_many_fields_is_refused(message: Any) -> None:
    is_raw = isinstance(message, bytes)
    with pytest.raises(BadRequest, match=f"more than {MAX_FIELDS} fields"):
        read(
            ModelInferRequest if is_raw else type(message),
            message if is_raw else message.SerializeToString(),
        )


def tensor_of(*shape: int, **extra_fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": shape, **extra_fields}


@pytest.mark.slow
def test_packed_numbers_do_not_count_as_fields() -> None:
    numbers = {"fp32_contents": [1.5] * MANY_FIELDS}
    for request in (
        ModelInferRequest(inputs=[tensor_of(MANY_FIELDS, contents=numbers)]),
        ModelInferRequest(raw_input_contents=[bytes(1_000_000)]),
    ):
        assert read(ModelInferRequest, request.SerializeToString()) == request


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * 100_000, b"\x2a", b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80" * 50_000],
)
def test_an_invalid_message_is_a_bad_request(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="is not a ModelInferRequest"):
        read(ModelInferRequest, raw)


def test_the_dimensions_of_a_tensor_are_limited() -> None:
    request = ModelInferRequest(
        inputs=[tensor_of(*[1] * MANY_FIELDS)], raw_input_contents=[b"1234"]
    )
    with pytest.raises(BadRequest, match=f"{MANY_FIELDS} dimensions: a tensor has at most 64"):
        pack(request)


def test_gzip_is_decompressed_up_to_the_limit() -> None:
    request = PredictionsRequest(model_name="m", input={"data": bytes(1000)})
    compressed = gzip.compress(request.SerializeToString())
    assert read(PredictionsRequest, compressed) == request
    with pytest.raises(PayloadTooLarge, match="more than 999 bytes"):
        read(PredictionsRequest, compressed, 999)
    with pytest.raises(BadRequest, match="its end is missing"):
        decompress(compressed[:-1], MAX_BYTES)
    with pytest.raises(BadRequest, match="cannot be unpacked"):
        decompress(b"\x1f\x8b\x08\xff" + bytes(20), MAX_BYTES)


def test_every_limit_of_the_settings_is_passed_to_grpc_core() -> None:
    settings = Settings(grpc_max_connections=8, header_timeout=3, max_header_size=2048)
    channel_options = dict(build_channel_options(settings))
    assert channel_options["grpc.max_allowed_incoming_connections"] == 8
    assert (
        channel_options["grpc.server_handshake_timeout_ms"]
        == channel_options["grpc.http2.settings_timeout"]
        == 3000
    )
    assert (
        channel_options["grpc.max_metadata_size"]
        == channel_options["grpc.absolute_max_metadata_size"]
        == 2048
    )
