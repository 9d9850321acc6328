"""A double of SageMaker's host: it unpacks a model, starts `serve`, pings, invokes and stops.

The documented limits are 2 s for a ping, 60 s for an invocation, 6 MiB for each body, and 30 s
between SIGTERM and SIGKILL.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support import forked
from tests.support.servers import DEADLINE, clean
from tsx_cli.deploy.engine.facts import write_model_data

PING, INVOCATION, STOP = 2.0, 60.0, 30.0  # seconds
MAX_BODY_BYTES = 6 << 20
# Besides the content type, this is the only client header that reaches the container.
PASSED_ON = "x-amzn-sagemaker-custom-attributes"


@dataclass
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Host:
    process: subprocess.Popen[bytes]
    port: int
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def ping(self) -> int:
        return self._ask("GET", "/ping", PING).status

    def invoke(
        self, body: bytes, content_type: str = "application/json", attributes: str | None = None
    ) -> Answered:
        headers = {"Content-Type": content_type, **({PASSED_ON: attributes} if attributes else {})}
        answered = self._ask("POST", "/invocations", INVOCATION, body, headers)
        assert len(answered.body) <= MAX_BODY_BYTES
        return answered

    def get(self, path: str) -> Answered:
        return self._ask("GET", path, INVOCATION)

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> Answered:
        return self._ask("POST", path, INVOCATION, body, headers)

    def load(self, name: str, url: str) -> Answered:
        return self.post(
            "/models",
            json.dumps({"model_name": name, "url": url}).encode(),
            {"Content-Type": "application/json"},
        )

    @contextmanager
    def begun(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Generator[Callable[[], Answered], None, None]:
        """Send a request whose response is read later."""
        with ThreadPoolExecutor(1) as thread:
            yield thread.submit(self.post, path, body, headers).result

    def processes(self) -> list[int]:
        """Return the processes of the container except the first."""
        return [
            process.pid
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if process.status() != psutil.STATUS_ZOMBIE
        ]

    def delete(self, path: str) -> Answered:
        return self._ask("DELETE", path, INVOCATION)

    @contextmanager
    def opened(
        self, path: str, body: bytes, headers: Mapping[str, str], limit: float
    ) -> Generator[http.client.HTTPResponse, None, None]:
        """Yield a response whose body has not been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        try:
            connection.request("POST", path, body, dict(headers))
            yield connection.getresponse()
        finally:
            connection.close()

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL 30 s later; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def wait_until_healthy(self) -> None:
        self.wait_until(self._is_well)

    def wait_until(self, fulfilled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the container ended with {self.process.returncode}: {self.log}"
                )
            if fulfilled():
                return
            time.sleep(0.05)
        raise AssertionError(f"it did not come about in time: {self.log}")

    def _is_well(self) -> bool:
        try:
            return self.ping() == 200
        except OSError:
            return False

    def _ask(
        self,
        method: str,
        path: str,
        limit: float,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
    ) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Answered(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()


@contextmanager
def container(
    directory: Path, port: int, environment: Mapping[str, str]
) -> Generator[Host, None, None]:
    """Start the image's entry point with the model in `directory`/model, and kill it at the end."""
    log_file = directory / "container.log"
    variables = {
        "SAGEMAKER_BASE_DIR": str(directory),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        **environment,
    }
    with log_file.open("w") as log:
        command = [sys.executable, "-m", "tsx_runtime.targets.entry", "serve"]
        process = forked.Popen(command, cwd=directory, env=clean(variables), stdout=log, stderr=log)
    try:
        yield Host(process, port, log_file)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def unpack(archive: Path, directory: Path) -> None:
    """Unpack the upload of `tsx deploy` into `directory`/model."""
    with tarfile.open(write_model_data(archive, directory)) as packed:
        packed.extractall(directory / "model")
