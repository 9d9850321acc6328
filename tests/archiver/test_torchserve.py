"""TorchServe 0.12 loads and serves archives of tsx in every format."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tsx_archiver import ArchiveSpec, write_archive

HANDLER = """
import os

def handle(data, context):
    if data is None:
        return None
    directory = context.system_properties["model_dir"]
    weights = context.manifest["model"]["serializedFile"]
    size = os.path.getsize(os.path.join(directory, weights))
    return [f"{context.model_name} {size} {context.model_yaml_config['word']}" for _ in data]
"""
FORMATS = {"deflated": "default", "stored": "zip-store", "tarred": "tgz", "plain": "no-archive"}


@pytest.fixture(scope="module")
def address(
    peer_bin: Path, tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]
) -> Iterator[str]:
    """Start a TorchServe that serves one model of every form."""
    if shutil.which("java") is None:
        pytest.skip("TorchServe needs Java")
    directory = tmp_path_factory.mktemp("torchserve")
    (directory / "handler.py").write_text(HANDLER)
    (directory / "weights.bin").write_bytes(os.urandom(200_000))
    (directory / "config.yaml").write_text(
        "word: hello\nminWorkers: 1\nmaxWorkers: 1\nbatchPolicy: wait\n"
    )
    for name, format in FORMATS.items():
        spec = ArchiveSpec(
            name,
            str(directory / "handler.py"),
            serialized_file=directory / "weights.bin",
            config_file=directory / "config.yaml",
        )
        write_archive(spec, directory / "store", format=format)  # type: ignore[arg-type]  # each is a Format
    inference, management, metrics, grpc_inference, grpc_management, workers = free_ports(6)
    (directory / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{inference}\nmanagement_address=http://127.0.0.1:{management}\n"
        f"metrics_address=http://127.0.0.1:{metrics}\ngrpc_inference_port={grpc_inference}\ngrpc_management_port={grpc_management}\n"
        # Another TorchServe on this machine may use the default worker ports.
        f"default_workers_per_model=1\ninitial_worker_port={workers}\n"
    )
    environment = {
        **os.environ,
        "PATH": f"{peer_bin}{os.pathsep}{os.environ['PATH']}",
        "TEMP": str(directory),
    }
    command = [
        peer_bin / "torchserve",
        "--start",
        "--foreground",
        "--ncs",
        "--disable-token-auth",
        "--model-store",
        directory / "store",
    ]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--models", "all", "--ts-config", directory / "config.properties"],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_workers(server, f"http://127.0.0.1:{inference}", directory / "log")
        yield f"http://127.0.0.1:{inference}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.parametrize("name", FORMATS)
def test_an_archive_loads_in_torchserve_and_predicts(address: str, name: str) -> None:
    assert predict(address, name) == f"{name} 200000 hello"


def predict(address: str, name: str) -> str:
    with urllib.request.urlopen(f"{address}/predictions/{name}", data=b"{}", timeout=30) as answer:
        return str(answer.read().decode())


def wait_for_workers(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    for name in FORMATS:
        while True:
            try:
                predict(address, name)
                break
            except (urllib.error.URLError, ConnectionError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(0.3)
            if server.returncode is not None or time.monotonic() > deadline:
                pytest.fail(log.read_text()[-3000:])
