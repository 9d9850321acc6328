"""`tsx deploy --target kubernetes` with a double of kubectl."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.support import deploying
from tests.support.models import make_model
from tests.support.platforms.kubectl import Cluster
from tsx_cli.deploy.kubernetes import kinds

# Schemas of custom resources.
SCHEMAS = Path(__file__).parent / "schemas"
IMAGE = "registry.example.com/digits:1"
KSERVE = "--set=kubernetes.kserve=true --set=kubernetes.storage=s3://models/digits"


def check(manifest: dict[str, Any]) -> None:
    """Validate a manifest by its schema."""
    schema = SCHEMAS / f"{manifest['kind']}.json"
    if schema.is_file():
        jsonschema.validate(manifest, json.loads(schema.read_text()))
    else:
        kubernetes_validate.validate(manifest, "1.33", strict=True)


class Deploy(deploying.Deploy):
    """The command for the deployment digits on Kubernetes."""

    def __call__(self, *arguments: str, code: int = 0) -> str:
        return super().__call__(*arguments, "--name=digits", "--target=kubernetes", code=code)

    def plan(self, *arguments: str, code: int) -> dict[str, str]:
        return deploying.actions(super().plan(*arguments, code=code))


@pytest.fixture
def deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Deploy:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kinds.KubernetesObject, "poll_interval_s", 0.0)
    monkeypatch.setattr(kinds.Revision, "poll_interval_s", 0.0)
    (tmp_path / "kubectl").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    make_model(tmp_path / "digits.mar", deploying.HANDLER)
    deploy = Deploy(Path("digits.mar"), "kubernetes", capsys)
    deploy.image = ("--image", IMAGE)
    return deploy


@contextmanager
def serving_pod(
    cluster: Cluster, answer: Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]
) -> Iterator[None]:
    """Serve requests to the pod's port that kubectl forwards."""

    class Pod(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answer(self)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Pod)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    cluster.forwarded = f"Forwarding from 127.0.0.1:{server.server_port} -> 8082"
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def container_of(cluster: Cluster, deployment: str = "digits") -> Any:
    pod = cluster.objects["Deployment", deployment]["spec"]["template"]["spec"]
    return pod["containers"][0]
