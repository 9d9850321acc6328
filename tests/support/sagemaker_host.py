"""What SageMaker's host does to a container, by its documentation: unpack the model, start `serve`, ping, invoke, stop.

Limits: a ping is answered within 2 s, an invocation within 60 s, 6 MiB each way, SIGKILL 30 s after SIGTERM.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import DEADLINE, clean
from tsx_cli.deploy.facts import model_data

PING, INVOCATION, STOP = 2.0, 60.0, 30.0  # seconds
MOST = 6 << 20
PASSED_ON = "x-amzn-sagemaker-custom-attributes"  # with the content type, all of a client's headers that arrive


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

    def invoke(self, body: bytes, content_type: str = "application/json", attributes: str | None = None) -> Answered:
        headers = {"Content-Type": content_type, **({PASSED_ON: attributes} if attributes else {})}
        answered = self._ask("POST", "/invocations", INVOCATION, body, headers)
        assert len(answered.body) <= MOST
        return answered

    def get(self, path: str) -> Answered:
        return self._ask("GET", path, PING)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP)

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the container ended with {self.process.returncode}: {self.log}")
            try:
                if self.ping() == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)  # the platform asks again and again, too
        raise AssertionError(f"no healthy ping: {self.log}")

    def _ask(self, method: str, path: str, limit: float, body: bytes | None = None, headers: Mapping[str, str] = {}) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Answered(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        finally:
            connection.close()


@contextmanager
def container(directory: Path, port: int, environment: Mapping[str, str]) -> Generator[Host, None, None]:
    """The entry of the image, over what lies in `directory`/model; ended by SIGKILL where the test has not stopped it."""
    log_file = directory / "container.log"
    given = {"SAGEMAKER_BASE_DIR": str(directory), "SAGEMAKER_BIND_TO_PORT": str(port), **environment}
    with log_file.open("w") as log:
        command = [sys.executable, "-m", "tsx_runtime.targets.entry", "serve"]
        process = subprocess.Popen(command, cwd=directory, env=clean(given), stdout=log, stderr=log)
    try:
        yield Host(process, port, log_file)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def unpack(archive: Path, directory: Path) -> None:
    """`model.tar.gz` as `tsx deploy` uploads it, unpacked into `directory`/model as the host does."""
    with tarfile.open(model_data(archive, directory)) as packed:
        packed.extractall(directory / "model")
