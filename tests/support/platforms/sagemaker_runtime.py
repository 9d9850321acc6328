"""A double of SageMaker's runtime API in front of a container's host, for boto3's client.

It implements real-time, streamed and asynchronous invocations, and multi-model endpoints:
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_Operations_Amazon_SageMaker_Runtime.html
and mms-container-apis.html. Bodies have at most 6 MiB. A response with status 4xx or 5xx becomes a
ModelError with status 424. A streamed response is an event stream. Input and output of an
asynchronous invocation are objects in S3. A requested model is loaded first, and replaces others if
the memory is full.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import struct
import tarfile
import threading
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import quote, urlsplit

import boto3

from tests.support.platforms.sagemaker_host import INVOCATION, MAX_BODY_BYTES, Host

# The client headers that reach the container.
PASSED_ON = (
    "content-type",
    "accept",
    "x-amzn-sagemaker-custom-attributes",
    "x-amzn-sagemaker-session-id",
    "x-amzn-sagemaker-inference-id",
    "x-amzn-sagemaker-target-model",
    "x-amzn-sagemaker-inference-component",
)
RETURNED_HEADERS = (
    "content-type",
    "x-amzn-sagemaker-custom-attributes",
    "x-amzn-sagemaker-new-session-id",
    "x-amzn-sagemaker-closed-session-id",
)
ASYNCHRONOUS = 3600.0  # seconds
MOST_ASYNCHRONOUS = 1 << 30
OUT_OF_MEMORY, THERE_ALREADY = 507, 409
NO_COPY = (
    "Inference Component has no capacity to process this request. ApplicationAutoScaling may be in-progress (if configured) or try to "
    "increase the capacity by invoking UpdateInferenceComponentRuntimeConfig API."
)


class ModelFailed(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NoCapacity(Exception):
    """The error of an inference component without copies."""


class Loader:
    """The models of a prefix, archives in `store` that are loaded at their first request.

    If the memory is full, the least recently used model is unloaded.
    """

    def __init__(self, host: Host, store: Path, directory: Path) -> None:
        self._host, self._store, self._directory = host, store, directory
        self.loaded: list[str] = []  # opaque names, sorted by last use
        self.unloaded: list[str] = []
        self._lock = threading.Lock()

    def path_of(self, target: str) -> str:
        name = hashlib.sha256(target.encode()).hexdigest()[:32]
        with self._lock:
            if name in self.loaded:
                self.loaded.remove(name)
            else:
                self._load(name, target)
            self.loaded.append(name)
        return f"/models/{name}/invoke"

    def _load(self, name: str, target: str) -> None:
        directory = self._directory / name / "model"
        if not directory.exists():
            with tarfile.open(self._store / target) as packed:
                packed.extractall(directory)
        body = json.dumps({"model_name": name, "url": str(directory)}).encode()
        while True:
            answered = self._host.post("/models", body, {"Content-Type": "application/json"})
            if answered.status in (200, THERE_ALREADY):
                return
            if answered.status != OUT_OF_MEMORY or not self.loaded:
                raise ModelFailed(answered.status, answered.body.decode())
            self.unload(self.loaded[0])

    def unload(self, name: str) -> None:
        assert self._host.delete(f"/models/{quote(name, safe='')}").status == 200
        self.loaded.remove(name)
        self.unloaded.append(name)


class Runtime(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:  # named by http.server
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        kind = urlsplit(self.path).path.rpartition("/")[2]
        headers = {name: value for name, value in self.headers.items() if name.lower() in PASSED_ON}
        if len(body) > MAX_BODY_BYTES:
            self._refuse(
                400,
                "ValidationError",
                {"Message": f"the body has {len(body)} bytes; {MAX_BODY_BYTES} are the most"},
            )
            return
        try:
            if kind == "async-invocations":
                self._asynchronous(headers)
            elif kind == "invocations-response-stream":
                accept = self.headers.get("x-amzn-sagemaker-accept")
                self._stream(body, {**headers, **({"Accept": accept} if accept else {})})
            else:
                self._invoke(body, headers)
        except NoCapacity:
            self._refuse(400, "ValidationError", {"Message": NO_COPY})
        except ModelFailed as failed:
            self._refuse(424, "ModelError", _model_error(failed.status, str(failed)))

    def _path(self) -> str:
        target = self.headers.get("x-amzn-sagemaker-target-model")
        return (
            "/invocations"
            if target is None or self.server.loader is None
            else self.server.loader.path_of(target)
        )

    def _invoke(self, body: bytes, headers: Mapping[str, str]) -> None:
        component = self.headers.get("x-amzn-sagemaker-inference-component")
        host = self.server.host if component is None else self.server.components(component)
        answered = host.post(self._path(), body, headers)
        if answered.status >= 400:
            raise ModelFailed(answered.status, answered.body.decode("utf-8", "replace"))
        if len(answered.body) > MAX_BODY_BYTES:
            raise ModelFailed(
                500,
                f"the model's answer has {len(answered.body)} bytes; {MAX_BODY_BYTES} are the most",
            )
        returned_headers = {
            name: value for name, value in answered.headers.items() if name in RETURNED_HEADERS
        }
        self._answer(
            200,
            answered.body,
            {**returned_headers, "x-Amzn-Invoked-Production-Variant": "AllTraffic"},
        )

    def _stream(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send parts as they arrive; an interrupted stream ends with ModelStreamError."""
        with self.server.host.opened(self._path(), body, headers, INVOCATION) as answer:
            if answer.status >= 400:
                raise ModelFailed(answer.status, answer.read().decode("utf-8", "replace"))
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.amazon.eventstream")
            self.send_header(
                "X-Amzn-SageMaker-Content-Type", answer.getheader("content-type") or ""
            )
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while part := answer.read1(65536):
                    self.wfile.write(
                        event({":event-type": "PayloadPart", ":message-type": "event"}, part)
                    )
            except (OSError, http.client.HTTPException) as error:
                error_body = json.dumps(
                    {"Message": str(error), "ErrorCode": "StreamBroken"}
                ).encode()
                self.wfile.write(
                    event(
                        {":exception-type": "ModelStreamError", ":message-type": "exception"},
                        error_body,
                    )
                )
            self.close_connection = True

    def _asynchronous(self, client_headers: dict[str, str]) -> None:
        content_type = self.headers.get("x-amzn-sagemaker-content-type")
        headers = {**client_headers, "Content-Type": content_type or "application/octet-stream"}
        source, inference = (
            self.headers["x-amzn-sagemaker-inputlocation"],
            self.headers.get("x-amzn-sagemaker-inference-id") or "1",
        )
        output_url = f"{self.server.output}/{inference}.out"
        task = threading.Thread(target=self.server.run, args=(source, output_url, headers))
        task.start()
        self.server.tasks.append(task)
        self._answer(
            202,
            json.dumps({"InferenceId": inference}).encode(),
            {"X-Amzn-SageMaker-OutputLocation": output_url},
        )

    def _refuse(self, status: int, kind: str, error_body: Mapping[str, Any]) -> None:
        self._answer(
            status,
            json.dumps(error_body).encode(),
            {"x-amzn-errortype": kind, "content-type": "application/json"},
        )

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def no_components(name: str) -> Host:
    raise AssertionError(f"there is no component {name}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, host: Host, loader: Loader | None, output: str, components: Callable[[str], Host]
    ) -> None:
        super().__init__(("127.0.0.1", 0), Runtime)
        self.host, self.loader, self.output, self.components = host, loader, output, components
        self.tasks: list[threading.Thread] = []

    def run(self, source: str, output_url: str, headers: Mapping[str, str]) -> None:
        """Run an asynchronous invocation from S3 to S3; errors become `.failure` objects."""
        s3 = boto3.client("s3")
        bucket, _, key = source.removeprefix("s3://").partition("/")
        body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        assert len(body) <= MOST_ASYNCHRONOUS
        with self.host.opened("/invocations", body, headers, ASYNCHRONOUS) as answer:
            bucket, _, key = output_url.removeprefix("s3://").partition("/")
            kind = (
                {"ContentType": answer.headers["content-type"]}
                if "content-type" in answer.headers
                else {}
            )
            s3.put_object(
                Bucket=bucket,
                Key=key if answer.status < 400 else f"{key}.failure",
                Body=answer.read(),
                **kind,
            )


def _model_error(status: int, message: str) -> dict[str, Any]:
    text = f"Received client error ({status}) from primary with message {json.dumps(message)}."
    return {
        "Message": text,
        "OriginalStatusCode": status,
        "OriginalMessage": message,
        "LogStreamArn": "arn:aws:logs:::log-group:none",
    }


def event(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Encode one message of an event stream.

    It consists of lengths, their checksum, headers, the payload, and a checksum of everything.
    Header values of type 7 are text.

    https://docs.aws.amazon.com/transcribe/latest/dg/event-stream.html
    """
    block = b"".join(
        struct.pack(">B", len(name))
        + name.encode()
        + struct.pack(">BH", 7, len(value))
        + value.encode()
        for name, value in headers.items()
    )
    begin = struct.pack(">II", 16 + len(block) + len(payload), len(block))
    checked = begin + struct.pack(">I", zlib.crc32(begin)) + block + payload
    return checked + struct.pack(">I", zlib.crc32(checked))


@contextmanager
def runtime(
    host: Host,
    loader: Loader | None = None,
    output: str = "",
    components: Callable[[str], Host] = no_components,
) -> Generator[Any, None, None]:
    """Yield boto3's client of one endpoint, whatever its name.

    `output` is the place of asynchronous answers. `components` returns the container of an
    inference component, or raises NoCapacity.
    """
    server = _Server(host, loader, output, components)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    address = cast("tuple[str, int]", server.server_address)
    credentials = {
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
        "region_name": "eu-central-1",
    }
    with patch.dict(
        os.environ, {"AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": f"http://127.0.0.1:{address[1]}"}
    ):
        client = boto3.client("sagemaker-runtime", **credentials)
    try:
        yield client
    finally:
        for task in server.tasks:
            task.join(INVOCATION)
        client.close()
        server.shutdown()
        server.server_close()
        thread.join()
