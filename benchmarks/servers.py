"""The measured servers, started by their own commands on free ports of loopback."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

TSX = Path(sys.executable).with_name("tsx")
START_TIMEOUT_S = 120


class Server(NamedTuple):
    name: str
    process: subprocess.Popen[bytes]
    inference: str
    management: str

    def call(
        self,
        path: str,
        body: bytes | None = None,
        *,
        management: bool = False,
        method: str | None = None,
        content_type: str = "application/octet-stream",
    ) -> bytes:
        headers = {} if body is None else {"Content-Type": content_type}
        request = urllib.request.Request(
            (self.management if management else self.inference) + path, body, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content

    def proportional_memory(self) -> dict[int, int]:
        """Return the bytes of each process of the server; shared memory is divided (PSS)."""
        root = psutil.Process(self.process.pid)
        return {
            process.pid: process.memory_full_info().pss
            for process in [root, *root.children(recursive=True)]
        }


def free_ports(count: int) -> list[int]:
    """Return free ports of loopback.

    They are outside the range that the system assigns by itself, so they stay free until they are
    used. Other processes that call this get other ports.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = next(_ports(os.getpid()))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


@cache
def _ports(
    process: int, first_port: int = 10_000, end_port: int = 32_000, stride: int = 1009
) -> Iterator[int]:
    """Return the ports from `low` to `high`, rotated by the process's number.

    They are below those that Linux and macOS assign. Processes with neighbouring numbers start far
    apart.
    """
    begin = process * stride % (end_port - first_port)
    return itertools.cycle(
        first_port + (begin + step) % (end_port - first_port)
        for step in range(end_port - first_port)
    )


@contextmanager
def tsx(directory: Path, *arguments: str | Path, **settings: object) -> Iterator[Server]:
    """Start `tsx serve` with these arguments; it may not be ready yet."""
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in free_ports(3))
    environment = clean_environment() | {
        "TSX_INFERENCE_ADDRESS": inference,
        "TSX_MANAGEMENT_ADDRESS": management,
        "TSX_METRICS_ADDRESS": metrics,
        "TSX_CACHE_DIR": str(directory / "cache"),
        # The ports of gRPC are fixed, so servers could not run in parallel.
        "TSX_ENABLE_GRPC": "false",
    }
    environment |= {f"TSX_{name.upper()}": str(value) for name, value in settings.items()}
    with running([TSX, "serve", *arguments], directory, environment, "tsx") as process:
        yield Server("tsx", process, inference, management)


@contextmanager
def torchserve(directory: Path, archive: Path, environment_of_peer: Path) -> Iterator[Server]:
    """Start TorchServe with its fastest settings.

    These are no log lines per request, no tokens, no metrics of the machine, and a long queue.
    """
    scratch = directory / "torchserve"
    scratch.mkdir(exist_ok=True)
    log_settings = (
        "status = error\nrootLogger.level = error\nappender.a.type = Null\nappender.a.name ="
        " a\nrootLogger.appenderRef.a.ref = a\n"
    )
    (scratch / "log4j2.properties").write_text(log_settings)
    command = [
        environment_of_peer / "bin" / "torchserve",
        "--log-config",
        scratch / "log4j2.properties",
    ]
    # TorchServe's Java process does not receive the signal to end.
    with _torchserve_command("TorchServe", command, scratch, archive, grace_s=5) as server:
        yield server


@contextmanager
def tsx_torchserve(directory: Path, archive: Path) -> Iterator[Server]:
    """Start tsx's `torchserve` command with the same settings.

    Unlike TorchServe here, it writes a log line per request and the metric log.
    """
    scratch = directory / "tsx-torchserve"
    scratch.mkdir(exist_ok=True)
    with _torchserve_command(
        "tsx-torchserve", [TSX.with_name("torchserve")], scratch, archive, grace_s=20
    ) as server:
        yield server


@contextmanager
def _torchserve_command(
    name: str, command: list[str | Path], scratch: Path, archive: Path, grace_s: float
) -> Iterator[Server]:
    inference, management, metrics, grpc, grpc_management = free_ports(5)
    (scratch / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{inference}\n"
        f"management_address=http://127.0.0.1:{management}\n"
        f"metrics_address=http://127.0.0.1:{metrics}\n"
        f"grpc_inference_port={grpc}\ngrpc_management_port={grpc_management}\n"
        f"model_store={archive.parent}\nload_models={archive.name}\njob_queue_size=1000\n"
        "disable_token_authorization=true\ndisable_system_metrics=true\n"
    )
    command = [
        *command,
        "--start",
        "--foreground",
        "--ncs",
        "--ts-config",
        scratch / "config.properties",
    ]
    environment = foreign_environment() | {
        "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
        "TEMP": str(scratch),
        "TMPDIR": str(scratch),  # The pid file is in this directory.
        "LOG_LOCATION": str(scratch),
        "TSX_CACHE_DIR": str(scratch / "cache"),
    }
    with running(command, scratch, environment, name.lower(), grace_s) as process:
        yield Server(
            name, process, f"http://127.0.0.1:{inference}", f"http://127.0.0.1:{management}"
        )


@contextmanager
def running(
    command: Sequence[str | Path],
    directory: Path,
    environment: dict[str, str],
    name: str,
    grace_s: float = 20,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; kill what is left of it and its children `grace_s` seconds after SIGTERM."""
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        family = psutil.Process(process.pid)
        try:
            yield process
        except OSError as error:
            raise RuntimeError(
                f"{name} does not answer ({error}); it printed at"
                f" last:\n{log.read_text(errors='replace')[-3000:]}"
            ) from error
        finally:
            members = [family, *family.children(recursive=True)] if family.is_running() else []
            process.send_signal(signal.SIGTERM)
            _, remaining_processes = psutil.wait_procs(members, timeout=grace_s)
            for member in remaining_processes:
                member.kill()
            process.wait()


def first_answer(
    server: Server, path: str, body: bytes | None, content_type: str = "application/octet-stream"
) -> bytes:
    """Return the first response; repeat the request until the server and the model are ready."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return server.call(path, body, content_type=content_type)
        except OSError as error:
            may_retry = not isinstance(error, urllib.error.HTTPError) or error.code in (404, 503)
            if not may_retry or server.process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def foreign_environment() -> dict[str, str]:
    """Return the environment variables for another Python, without this one's module paths."""
    return {
        name: value for name, value in clean_environment().items() if not name.startswith("PYTHON")
    }


def clean_environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("TSX_", "TS_"))
    }


def archive(
    directory: Path,
    name: str,
    *arguments: str | Path,
    config: dict[str, object] | None = None,
    packer: Path | None = None,
) -> Path:
    """Pack an archive by tsx's `torch-model-archiver`, or by another program."""
    if config is not None:
        (directory / "model-config.yaml").write_text(json.dumps(config))  # JSON is valid YAML.
        arguments += ("--config-file", directory / "model-config.yaml")
    command = [
        packer or TSX.with_name("torch-model-archiver"),
        "--model-name",
        name,
        "--version",
        "1.0",
        *arguments,
        "--export-path",
        directory,
        "--archive-format",
        "zip-store",
        "--force",
    ]
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        env=foreign_environment() if packer else None,
    )
    return directory / f"{name}.mar"
