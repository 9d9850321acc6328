"""Messages that are refused before they are parsed or converted for a worker."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from tsx_runtime.errors import BadRequest, PayloadTooLarge
from tsx_runtime.grpc.messages import MAX_FIELDS, decompress, read_message
from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest
from tsx_runtime.grpc.protos.inference_pb2 import PredictionsRequest
from tsx_runtime.grpc.server import build_channel_options
from tsx_runtime.grpc.tensors import pack
from tsx_runtime.settings.schema import Settings

LARGEST = 10_000_000
MANY = 30_000


def read(kind: Any, raw: bytes, most: int = LARGEST) -> Any:
    return asyncio.run(read_message(kind, raw, most))


def many_parameters() -> ModelInferRequest:
    request = ModelInferRequest()
    for number in range(MAX_FIELDS):
        request.parameters[str(number)].bool_param = True
    return request


@pytest.mark.parametrize(
    "message",
    [
        PredictionsRequest(input={str(number): b"" for number in range(MANY)}),
        ModelInferRequest(inputs=[{"contents": {"bytes_contents": [b""] * MANY}}]),
        many_parameters(),
        *(b"%c\x00" % tag * MANY for tag in b"\x2a\x32\x3a"),
        b"\x0b" * 100_000,
    ],
    ids=["map of inputs", "strings", "parameters", "tensors", "outputs", "raw contents", "groups"],
)
def test_a_message_of_very_many_fields_is_refused(message: Any) -> None:
    is_raw = isinstance(message, bytes)
    with pytest.raises(BadRequest, match=f"more than {MAX_FIELDS} fields"):
        read(
            ModelInferRequest if is_raw else type(message),
            message if is_raw else message.SerializeToString(),
        )


def tensor_of(*shape: int, **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": shape, **more}


def test_numbers_are_not_counted_one_by_one() -> None:
    numbers = {"fp32_contents": [1.5] * MANY}
    for request in (
        ModelInferRequest(inputs=[tensor_of(MANY, contents=numbers)]),
        ModelInferRequest(raw_input_contents=[bytes(1_000_000)]),
    ):
        assert read(ModelInferRequest, request.SerializeToString()) == request


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * 100_000, b"\x2a", b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80" * 50_000],
)
def test_bytes_that_are_no_message_are_a_bad_request(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="is not a ModelInferRequest"):
        read(ModelInferRequest, raw)


def test_a_tensor_has_so_many_dimensions() -> None:
    request = ModelInferRequest(inputs=[tensor_of(*[1] * MANY)], raw_input_contents=[b"1234"])
    with pytest.raises(BadRequest, match=f"{MANY} dimensions: a tensor has at most 64"):
        pack(request)


def test_gzip_is_unpacked_up_to_the_limit() -> None:
    request = PredictionsRequest(model_name="m", input={"data": bytes(1000)})
    packed = gzip.compress(request.SerializeToString())
    assert read(PredictionsRequest, packed) == request
    with pytest.raises(PayloadTooLarge, match="more than 999 bytes"):
        read(PredictionsRequest, packed, 999)
    with pytest.raises(BadRequest, match="its end is missing"):
        decompress(packed[:-1], LARGEST)
    with pytest.raises(BadRequest, match="cannot be unpacked"):
        decompress(b"\x1f\x8b\x08\xff" + bytes(20), LARGEST)


def test_each_bound_of_the_settings_reaches_grpc_s_core_by_its_name() -> None:
    settings = Settings(grpc_max_connections=8, header_timeout=3, max_header_size=2048)
    chosen = dict(build_channel_options(settings))
    assert chosen["grpc.max_allowed_incoming_connections"] == 8
    assert (
        chosen["grpc.server_handshake_timeout_ms"] == chosen["grpc.http2.settings_timeout"] == 3000
    )
    assert chosen["grpc.max_metadata_size"] == chosen["grpc.absolute_max_metadata_size"] == 2048
