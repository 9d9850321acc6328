"""gRPC as a protocol of the generator: TorchServe's inference service, and the Open Inference
Protocol's.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_cli.bench.load.connection import CLOSED, context_of
from tsx_cli.bench.load.loops import TIMEOUT, Connect, Load, LoadClient
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.protocols import read_target, tensor_of
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.server_address import ServerAddress

try:
    import grpc
except ImportError as error:
    raise CliError(f"gRPC needs an extra: pip install 'tsx-serve[grpc]' ({error})") from error

PATIENCE = 10.0  # seconds to wait for a connection
METHODS = {
    "grpc": "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
    "kserve-v2-grpc": "/inference.GRPCInferenceService/ModelInfer",
}
REFUSED = {grpc.StatusCode.RESOURCE_EXHAUSTED: "429", grpc.StatusCode.UNAVAILABLE: "503"}
LARGEST = 1 << 30  # bytes of a message
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # or all channels are one connection
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_receive_message_length", LARGEST),
]
CONTENTS = {
    "BOOL": "bool",
    "INT64": "int64",
    "UINT64": "uint64",
    "FP32": "fp32",
    "FP64": "fp64",
    "BYTES": "bytes",
}
CONTENTS |= {f"INT{size}": "int" for size in (8, 16, 32)} | {
    f"UINT{size}": "uint" for size in (8, 16, 32)
}


class RpcConnection:
    """A gRPC channel that carries one call at a time."""

    def __init__(
        self, load: Load, channel: Any, method: str, metadata: Sequence[tuple[str, str]]
    ) -> None:
        self.load, self.channel, self.metadata = load, channel, metadata
        self.since = self.sent = 0.0
        self.number = 0
        self.gone = False
        self._call = channel.unary_unary(method)  # bytes in, bytes out
        self._task: asyncio.Task[None] | None = None

    def send(self, request: bytes) -> None:
        self._task = asyncio.get_running_loop().create_task(self._ask(request))

    def end(self, reason: str, now: float) -> None:
        self.close()
        self.load.broken(self, reason, now)

    def close(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self.channel.close())

    async def _ask(self, request: bytes) -> None:
        try:
            await self._call(request, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            self._failed(error)
        else:
            self.load.accept(self, self.load.stamp())

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        code, load = error.code(), self.load
        if (
            code is grpc.StatusCode.UNAVAILABLE
            and self.channel.get_state() is not grpc.ChannelConnectivity.READY
        ):  # not sent by the server
            self._task = None
            self.end(CLOSED, load.stamp())
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            load.answered(self, TIMEOUT, load.stamp())
        else:
            load.answered(self, REFUSED.get(code, code.name), load.stamp())


def connector(plan: LoadPlan) -> Connect:
    place = read_target(plan.url)
    target = (
        f"unix:{place.socket}"
        if place.socket
        else f"{f'[{place.host}]' if ':' in place.host else place.host}:{place.port}"
    )
    metadata = () if plan.token is None else (("authorization", f"Bearer {plan.token}"),)
    trusted = context = None
    if place.secure:
        trusted = grpc.ssl_channel_credentials(
            Path(plan.certificate).read_bytes() if plan.certificate else None
        )
        context = context_of(plan, "h2")

    async def connect(load: Load) -> LoadClient:
        made = None
        try:
            await asyncio.wait_for(
                _probe(place, context), PATIENCE
            )  # a channel hides why it does not get through, and tries on
            made = (
                grpc.aio.secure_channel(target, trusted, OPTIONS)
                if trusted
                else grpc.aio.insecure_channel(target, OPTIONS)
            )
            await asyncio.wait_for(made.channel_ready(), PATIENCE)
        except asyncio.TimeoutError as error:
            if made is not None:
                await made.close()
            known = "" if trusted else ", and does it speak TLS (https://)"
            raise OSError(
                f"no gRPC within {PATIENCE:g} seconds: is that its gRPC port{known}?"
            ) from error
        return RpcConnection(load, made, METHODS[plan.protocol], metadata)

    return connect


async def _probe(place: ServerAddress, context: ssl.SSLContext | None) -> None:
    """Raises OSError, of which one of TLS says what is wrong with a certificate."""
    if place.socket:
        _, probe = await asyncio.open_unix_connection(place.socket)
    else:
        _, probe = await asyncio.open_connection(place.host, place.port, ssl=context)
    probe.close()


def rendered(plan: LoadPlan) -> Sequence[bytes]:
    make = _prediction if plan.protocol == "grpc" else _inference
    return [make(plan, payload) for payload in plan.payloads]


def _prediction(plan: LoadPlan, payload: Payload) -> bytes:
    from tsx_runtime.grpc.protos.inference_pb2 import PredictionsRequest

    return bytes(
        PredictionsRequest(
            model_name=plan.model, model_version=plan.version or "", input={"data": payload.body}
        ).SerializeToString()
    )


def _inference(plan: LoadPlan, payload: Payload) -> bytes:
    """JSON of the protocol's form over HTTP becomes messages, lists of numbers a tensor, all else
    one value of bytes.
    """
    from tsx_runtime.grpc.protos.grpc_predict_v2_pb2 import ModelInferRequest

    try:
        value = json.loads(payload.body)
    except (ValueError, RecursionError):
        value = None
    tensor = tensor_of(value)
    if isinstance(value, Mapping) and "inputs" in value:
        tensors = value["inputs"]
    else:
        tensors = [
            tensor or {"name": "input-0", "shape": [1], "datatype": "BYTES", "data": [payload.body]}
        ]
    try:
        request = ModelInferRequest(
            model_name=plan.model,
            model_version=plan.version or "",
            inputs=[
                {
                    "name": each["name"],
                    "datatype": each["datatype"],
                    "shape": each["shape"],
                    "contents": {
                        f"{CONTENTS[each['datatype']]}_contents": list(_flat(each["data"]))
                    },
                }
                for each in tensors
            ],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"an input is not a request of the Open Inference Protocol: {type(error).__name__}:"
            f" {error}"
        ) from error
    return bytes(request.SerializeToString())


def _flat(data: Any) -> Iterator[Any]:
    for each in data:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each.encode() if isinstance(each, str) else each
