"""gRPC protocols of the generator: TorchServe's service and the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tsx_cli.bench.load.connection import CLOSED, tls_context
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

CONNECT_TIMEOUT_S = 10.0
METHODS = {
    "grpc": "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
    "kserve-v2-grpc": "/inference.GRPCInferenceService/ModelInfer",
}
REFUSAL_STATUSES = {grpc.StatusCode.RESOURCE_EXHAUSTED: "429", grpc.StatusCode.UNAVAILABLE: "503"}
MAX_MESSAGE_BYTES = 1 << 30
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # By default, all channels share a connection.
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
CONTENT_FIELDS = {
    "BOOL": "bool",
    "INT64": "int64",
    "UINT64": "uint64",
    "FP32": "fp32",
    "FP64": "fp64",
    "BYTES": "bytes",
}
CONTENT_FIELDS |= {f"INT{size}": "int" for size in (8, 16, 32)} | {
    f"UINT{size}": "uint" for size in (8, 16, 32)
}


class RpcConnection:
    """A gRPC channel that carries one call at a time."""

    def __init__(
        self, load: Load, channel: Any, method: str, metadata: Sequence[tuple[str, str]]
    ) -> None:
        self.load, self.channel, self.metadata = load, channel, metadata
        self.latency_start = self.send_time = 0.0
        self.payload_index = 0
        self.is_closed = False
        self._call = channel.unary_unary(
            method
        )  # Without serializers, a call takes and returns bytes.
        self._task: asyncio.Task[None] | None = None

    def send(self, request: bytes) -> None:
        self._task = asyncio.get_running_loop().create_task(self._call_once(request))

    def end(self, reason: str, now: float) -> None:
        self.close()
        self.load.on_broken(self, reason, now)

    def close(self) -> None:
        self.is_closed = True
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self.channel.close())

    async def _call_once(self, request: bytes) -> None:
        try:
            await self._call(request, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            self._report_failure(error)
        else:
            self.load.accept(self, self.load.stamp())

    def _report_failure(self, error: grpc.aio.AioRpcError) -> None:
        code, load = error.code(), self.load
        # The channel is not connected, so this status is not from the server.
        if (
            code is grpc.StatusCode.UNAVAILABLE
            and self.channel.get_state() is not grpc.ChannelConnectivity.READY
        ):
            self._task = None
            self.end(CLOSED, load.stamp())
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            load.on_answer(self, TIMEOUT, load.stamp())
        else:
            load.on_answer(self, REFUSAL_STATUSES.get(code, code.name), load.stamp())


def connector(plan: LoadPlan) -> Connect:
    address = read_target(plan.url)
    target = (
        f"unix:{address.socket}"
        if address.socket
        else f"{f'[{address.host}]' if ':' in address.host else address.host}:{address.port}"
    )
    metadata = () if plan.token is None else (("authorization", f"Bearer {plan.token}"),)
    credentials = context = None
    if address.secure:
        credentials = grpc.ssl_channel_credentials(
            Path(plan.certificate).read_bytes() if plan.certificate else None
        )
        context = tls_context(plan, "h2")

    async def connect(load: Load) -> LoadClient:
        channel = None
        try:
            # A channel retries silently if it cannot connect. The probe raises the reason instead.
            await asyncio.wait_for(_probe(address, context), CONNECT_TIMEOUT_S)
            channel = (
                grpc.aio.secure_channel(target, credentials, CHANNEL_OPTIONS)
                if credentials
                else grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
            )
            await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            if channel is not None:
                await channel.close()
            advice = "" if credentials else ", and does it speak TLS (https://)"
            raise OSError(
                f"no gRPC within {CONNECT_TIMEOUT_S:g} seconds: is that its gRPC port{advice}?"
            ) from error
        return RpcConnection(load, channel, METHODS[plan.protocol], metadata)

    return connect


async def _probe(address: ServerAddress, context: ssl.SSLContext | None) -> None:
    """Open a connection once, and close it.

    Raises:
        OSError: The connection fails; a TLS error describes what is wrong with a certificate.
    """
    if address.socket:
        _, probe = await asyncio.open_unix_connection(address.socket)
    else:
        _, probe = await asyncio.open_connection(address.host, address.port, ssl=context)
    probe.close()


def render_requests(plan: LoadPlan) -> Sequence[bytes]:
    encode = _prediction if plan.protocol == "grpc" else _inference
    return [encode(plan, payload) for payload in plan.payloads]


def _prediction(plan: LoadPlan, payload: Payload) -> bytes:
    from tsx_runtime.grpc.protos.inference_pb2 import PredictionsRequest

    return bytes(
        PredictionsRequest(
            model_name=plan.model, model_version=plan.version or "", input={"data": payload.body}
        ).SerializeToString()
    )


def _inference(plan: LoadPlan, payload: Payload) -> bytes:
    """Encode a payload for the Open Inference Protocol.

    JSON in the protocol's HTTP form becomes messages, nested lists of numbers become a tensor, and
    any other payload becomes one BYTES value.
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
                    "name": tensor["name"],
                    "datatype": tensor["datatype"],
                    "shape": tensor["shape"],
                    "contents": {
                        f"{CONTENT_FIELDS[tensor['datatype']]}_contents": list(
                            _flat(tensor["data"])
                        )
                    },
                }
                for tensor in tensors
            ],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"an input is not a request of the Open Inference Protocol: {type(error).__name__}:"
            f" {error}"
        ) from error
    return bytes(request.SerializeToString())


def _flat(data: Any) -> Iterator[Any]:
    for item in data:
        if isinstance(item, list):
            yield from _flat(item)
        else:
            yield item.encode() if isinstance(item, str) else item
