"""TorchServe and tsx with the same configuration, and requests to each of them."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.differential.cases import Case
from tests.differential.models import MODELS
from tests.support import forked

# Java and workers that import torch start slowly.
START_TIMEOUT_S = 180.0
RESPONSE_TIMEOUT_S = 60.0

PROPERTIES = """
inference_address=http://127.0.0.1:{0}
management_address=http://127.0.0.1:{1}
metrics_address=http://127.0.0.1:{2}
grpc_inference_port={3}
grpc_management_port={4}
default_workers_per_model=1
enable_model_api=true
disable_token_authorization=true
disable_system_metrics=true
model_store={store}
load_models={models}
"""


class ServerResponse(NamedTuple):
    """A response with header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Side(NamedTuple):
    """The ports and the logs of one server."""

    inference: int
    management: int
    grpc: int
    logs: Path

    def send(self, case: Case) -> ServerResponse:
        connection = http.client.HTTPConnection(
            "127.0.0.1",
            self.management if case.management else self.inference,
            timeout=RESPONSE_TIMEOUT_S,
        )
        with contextlib.closing(connection):
            connection.request(case.method, case.target, case.body, dict(case.headers))
            answer = connection.getresponse()
            return ServerResponse(
                answer.status,
                {name.lower(): value for name, value in answer.getheaders()},
                answer.read(),
            )


@contextlib.contextmanager
def serving(
    command: Sequence[str | Path], directory: Path, store: Path, ports: list[int], path: str
) -> Iterator[Side]:
    """Start a server with this `torchserve` command, whose PATH begins with `path`."""
    directory.mkdir()
    properties = directory / "config.properties"
    properties.write_text(
        PROPERTIES.format(*ports, store=store, models=",".join(f"{name}.mar" for name in MODELS))
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TS_", "TSX_", "PYTHONPATH"))
    }
    environment |= {
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "TEMP": str(directory),
        "LOG_LOCATION": str(directory),
    }
    # The server ends before Java's compiler would save time.
    environment["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    if command[0] != sys.executable:
        # `models.TORCH_STUB` explains the stub.
        environment["PYTHONPATH"] = str(store.parent)
    elif "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    arguments = ["--start", "--foreground", "--ncs", "--ts-config", properties]
    with (directory / "log").open("wb") as log:
        server = forked.Popen(
            [*command, *arguments],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    side = Side(ports[0], ports[1], ports[3], directory)
    try:
        for name in MODELS:
            wait_for(server, f"http://127.0.0.1:{ports[0]}/predictions/{name}", directory / "log")
        yield side
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(
    server: subprocess.Popen[bytes],
    url: str,
    log: Path,
    body: bytes | None = b"text",
    token: Callable[[], str] = lambda: "",
) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            request = urllib.request.Request(
                url, body, {"Content-Type": "text/plain", "Authorization": f"Bearer {token()}"}
            )
            urllib.request.urlopen(request, timeout=RESPONSE_TIMEOUT_S).close()
            return
        except (OSError, ValueError) as error:  # The token file may be incomplete.
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{url} does not answer ({error}): {log.read_text(errors='replace')[-3000:]}"
                ) from error
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Polling is needed, since neither server reports that its workers are ready.
                server.wait(0.3)
