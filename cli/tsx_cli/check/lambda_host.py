"""A host that simulates Lambda according to its documentation.

It starts a container, serves the Runtime API, freezes the container between invocations, and ends
it. The limits are 10 s for a start, the function's timeout, and 6 MB for a request and a response.
A second start counts as part of the invocation. An environment that has ended or timed out is
replaced at the next invocation.
https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html, lambda-runtime-environment.html,
gettingstarted-limits.html
"""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

MAX_REQUEST_BYTES = 6_291_456
MAX_RESPONSE_BYTES = 6_291_556
MAX_INIT_S = 10.0
ARN = "arn:aws:lambda:eu-central-1:123456789012:function:digits"
API = "/2018-06-01/runtime/"


class RequestTooLarge(Exception):
    """The error 413, RequestTooLargeException. The function is not invoked."""


@dataclass
class HostedInvocation:
    """An invocation and its response."""

    payload: bytes
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    deadline: float = 0.0  # time.time()
    answer: bytes = b""
    error: str | None = None  # X-Amz-Function-Error
    streamed: bool = False
    parts: queue.Queue[bytes | None] = field(default_factory=queue.Queue)
    done: threading.Event = field(default_factory=threading.Event)

    def json(self) -> Any:
        return json.loads(self.answer)

    def fail(self, kind: str, message: str) -> None:
        self.answer, self.error = (
            json.dumps({"errorType": kind, "errorMessage": message}).encode(),
            "Unhandled",
        )
        self.end()

    def end(self) -> None:
        self.parts.put(None)
        self.done.set()


class Host:
    """A function. Its environment starts at an invocation, and ends with `close`."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        *,
        timeout: float = 60.0,
        concurrency: int = 1,
        freezes: bool = True,
        init: float = MAX_INIT_S,
        grace: float = 0.0,
    ) -> None:
        self.timeout = timeout
        self.log_file = directory / "lambda.log"
        self.start_count = 0  # number of started environments
        self.init_seconds = 0.0  # start time of the newest environment
        self.init_error: dict[str, Any] | None = None
        self._command = command
        self._directory = directory
        self._environment = dict(environment)
        self._concurrency = concurrency
        self._freezes = freezes and concurrency == 1
        self._init = init
        self._grace_s = grace  # added to the function's timeout, for a busy machine
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = self.log_file.open("ab")
        self._waiting: queue.Queue[HostedInvocation | None] = queue.Queue()
        self.in_flight: dict[str, HostedInvocation] = {}
        # Set when the environment asks for its first invocation, or ends.
        self._ready = threading.Event()
        self._start_time = 0.0
        self._server = _Server(self)
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def invoke(self, event: Any) -> HostedInvocation:
        """Invoke the function and wait for its response, like the type `RequestResponse`.

        Raises:
            RequestTooLarge: The event is larger than Lambda allows.
        """
        invocation = self.begin(event)
        self.wait(invocation)
        return invocation

    def begin(self, event: Any) -> HostedInvocation:
        payload = event if isinstance(event, bytes) else json.dumps(event).encode()
        if len(payload) > MAX_REQUEST_BYTES:
            raise RequestTooLarge(
                f"Request must be smaller than {MAX_REQUEST_BYTES} bytes for the InvokeFunction"
                " operation"
            )
        invocation = HostedInvocation(payload)
        with self._lock:
            if not self._is_running() and not self._start():
                head = self.init_error or {}
                invocation.fail(
                    head.get("errorType", "Runtime.ExitError"),
                    head.get("errorMessage", "Runtime exited during its start"),
                )
                return invocation
            invocation.deadline = time.time() + self.timeout
            self.in_flight[invocation.id] = invocation
            self._thaw()
            self._waiting.put(invocation)
        return invocation

    def wait(self, invocation: HostedInvocation) -> None:
        """Wait until the invocation is answered or timed out, or until its environment ends."""
        while not invocation.done.wait(
            0.02 if self._process is None or self._process.poll() is not None else 0.25
        ):
            process = self._process
            if process is not None and process.poll() is not None and not invocation.done.wait(0.2):
                self.in_flight.pop(invocation.id, None)
                invocation.fail(
                    "Runtime.ExitError",
                    f"RequestId: {invocation.id} Error: Runtime exited with error:"
                    f" {process.returncode}",
                )
            elif time.time() > invocation.deadline + self._grace_s and not invocation.done.is_set():
                self.in_flight.pop(invocation.id, None)
                self._kill()
                invocation.fail(
                    "Sandbox.Timedout",
                    f"RequestId: {invocation.id} Error: Task timed out after {self.timeout:.2f}"
                    " seconds",
                )

    def wait_for_exit(self, timeout_s: float) -> int | None:
        """Return the exit code of the environment's process, or None if it still runs."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def stop(self, timeout_s: float = 2.0) -> int | None:
        """Send SIGTERM, and return the exit code.

        Lambda sends SIGTERM if an extension is registered, and on Managed Instances.
        """
        assert self._process is not None
        self._thaw()
        self._process.send_signal(signal.SIGTERM)
        return self.wait_for_exit(timeout_s)

    def close(self) -> None:
        self._kill()
        self._server.shutdown()
        self._server.server_close()
        self._log.close()

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> bool:
        """Start an environment; return whether it asked for an invocation.

        A start that takes too long is repeated within the function's timeout.
        """
        for limit in (self._init, self.timeout):
            self._waiting = queue.Queue()
            self._ready.clear()
            self.init_error = None
            self._start_time = time.monotonic()
            self.start_count += 1
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=self._variables(),
                stdout=self._log,
                stderr=self._log,
                stdin=subprocess.DEVNULL,
            )
            threading.Thread(
                target=self._watch, args=(self._process, self._ready), daemon=True
            ).start()
            if self._ready.wait(limit):
                self.init_seconds = time.monotonic() - self._start_time
                return self.init_error is None and self._process.poll() is None
            self._kill()
        return False

    def _watch(self, process: subprocess.Popen[bytes], ready: threading.Event) -> None:
        process.wait()
        ready.set()

    def _variables(self) -> dict[str, str]:
        concurrency = (
            {"AWS_LAMBDA_MAX_CONCURRENCY": str(self._concurrency)} if self._concurrency > 1 else {}
        )
        kind = "lambda-managed-instances" if self._concurrency > 1 else "on-demand"
        return {
            "PATH": os.environ["PATH"],
            "AWS_LAMBDA_RUNTIME_API": self.address,
            "AWS_LAMBDA_FUNCTION_NAME": "digits",
            "AWS_LAMBDA_FUNCTION_VERSION": "1",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "3008",
            "AWS_LAMBDA_INITIALIZATION_TYPE": kind,
            "AWS_REGION": "eu-central-1",
            **concurrency,
            **self._environment,
        }

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._waiting.put(None)

    def _thaw(self) -> None:
        if self._freezes and self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    # Called by the Runtime API's server:

    def next(self) -> HostedInvocation | None:
        """Return the next invocation, or None if the environment has ended."""
        waiting = self._waiting
        self._ready.set()
        if self._freezes and waiting.empty() and self._process is not None:
            with self._lock:
                if waiting.empty():
                    self._process.send_signal(signal.SIGSTOP)
        return waiting.get()

    def accept_response(
        self, invocation: HostedInvocation, body: bytes, *, failed: bool = False
    ) -> int:
        """Deliver a response, and return the status of the Runtime API."""
        if self.in_flight.pop(invocation.id, None) is None:
            return 400
        if failed:
            invocation.error = "Unhandled"
        elif len(body) > MAX_RESPONSE_BYTES and not invocation.streamed:
            text = (
                f"Response payload size exceeded maximum allowed payload size ({MAX_RESPONSE_BYTES}"
                " bytes)."
            )
            invocation.fail("Function.ResponseSizeTooLarge", text)
            return 413
        invocation.answer = body
        invocation.end()
        return 202


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: Host) -> None:
        self.host = host
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that an ended environment has left."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Nagle's algorithm would delay a small response by 40 ms.
    disable_nagle_algorithm = True
    wbufsize = -1  # sends the head and the body in one packet
    server: _Server

    def do_GET(self) -> None:
        if self.path != f"{API}invocation/next":
            self._reply(404, b"{}")
            return
        invocation = self.server.host.next()
        if invocation is None:
            self.close_connection = True
            return
        headers = {
            "Lambda-Runtime-Aws-Request-Id": invocation.id,
            "Lambda-Runtime-Deadline-Ms": str(int(invocation.deadline * 1000)),
            "Lambda-Runtime-Invoked-Function-Arn": ARN,
            "Lambda-Runtime-Trace-Id": (
                "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700;Parent=9a9197af755a6419;Sampled=0"
            ),
        }
        self._reply(200, invocation.payload, headers)

    def do_POST(self) -> None:
        host, path = self.server.host, self.path
        if path == f"{API}init/error":
            host.init_error = json.loads(self._body())
            self._reply(202, b'{"status":"OK"}')
            return
        _, _, suffix = path.partition(f"{API}invocation/")
        id, _, verb = suffix.partition("/")
        invocation = host.in_flight.get(id)
        if (
            invocation is not None
            and verb == "response"
            and self.headers.get("Lambda-Runtime-Function-Response-Mode") == "streaming"
        ):
            self._reply(self._stream(host, invocation), b'{"status":"OK"}')
            return
        body = self._body()
        if invocation is None or verb not in ("response", "error"):
            self._reply(
                400, b'{"errorType":"InvalidRequestID","errorMessage":"no such invocation"}'
            )
        else:
            self._reply(
                host.accept_response(invocation, body, failed=verb == "error"), b'{"status":"OK"}'
            )

    def _stream(self, host: Host, invocation: HostedInvocation) -> int:
        invocation.streamed = True
        body = b""
        for part in self._chunks():
            invocation.parts.put(part)
            body += part
        trailers = {}
        while (line := self.rfile.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            trailers[name.strip().lower()] = value.strip()
        if head := trailers.get("lambda-runtime-function-error-body"):
            invocation.error = base64.b64decode(head).decode()
        return host.accept_response(invocation, body)

    def _chunks(self) -> Any:
        while size := int(self.rfile.readline(), 16):
            part = self.rfile.read(size)
            self.rfile.readline()
            yield part

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b"".join(self._chunks())
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the log belongs to the function."""
