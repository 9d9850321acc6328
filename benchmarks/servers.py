"""The servers that are measured, started by their own commands on free ports of loopback, and ended
when the measurement is.
"""

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
START_SECONDS = 120


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
    ) -> bytes:
        headers = {} if body is None else {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(
            (self.management if management else self.inference) + path, body, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            content: bytes = answer.read()
            return content

    def proportional_memory(self) -> dict[int, int]:
        """Bytes of each process of the server's tree, what is shared divided among those that share
        it (PSS).
        """
        root = psutil.Process(self.process.pid)
        return {
            process.pid: process.memory_full_info().pss
            for process in [root, *root.children(recursive=True)]
        }


def free_ports(count: int) -> list[int]:
    """So many ports of loopback that nothing listens on.

    The system gives none of them to who asks it for any port, so that nobody
    comes by one before it is used; and another process finds others.
    """
    found: list[int] = []
    while len(found) < count:
        port = next(_ports(os.getpid()))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


@cache
def _ports(
    process: int, low: int = 10_000, high: int = 32_000, stride: int = 1009
) -> Iterator[int]:
    """All between the two, below those that Linux and macOS give out by themselves; processes with
    neighbouring numbers begin far apart.
    """
    begin = process * stride % (high - low)
    return itertools.cycle(low + (begin + step) % (high - low) for step in range(high - low))


@contextmanager
def tsx(directory: Path, *arguments: str | Path, **settings: object) -> Iterator[Server]:
    """`tsx serve` with these arguments; it may not answer yet."""
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in free_ports(3))
    environment = clean_environment() | {
        "TSX_INFERENCE_ADDRESS": inference,
        "TSX_MANAGEMENT_ADDRESS": management,
        "TSX_METRICS_ADDRESS": metrics,
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_ENABLE_GRPC": "false",  # its ports are fixed ones
    }
    environment |= {f"TSX_{name.upper()}": str(value) for name, value in settings.items()}
    with running([TSX, "serve", *arguments], directory, environment, "tsx") as process:
        yield Server("tsx", process, inference, management)


@contextmanager
def torchserve(directory: Path, archive: Path, environment_of_peer: Path) -> Iterator[Server]:
    """TorchServe as fast as its settings make it: no log lines per request, no tokens, no metrics
    of the machine, a long queue.
    """
    place = directory / "torchserve"
    place.mkdir(exist_ok=True)
    quiet = (
        "status = error\nrootLogger.level = error\nappender.a.type = Null\nappender.a.name ="
        " a\nrootLogger.appenderRef.a.ref = a\n"
    )
    (place / "log4j2.properties").write_text(quiet)
    command = [
        environment_of_peer / "bin" / "torchserve",
        "--log-config",
        place / "log4j2.properties",
    ]
    with _torchserve_command(
        "TorchServe", command, place, archive, patience=5
    ) as server:  # its Java does not hear of the end
        yield server


@contextmanager
def tsx_torchserve(directory: Path, archive: Path) -> Iterator[Server]:
    """tsx's `torchserve` command, with the same settings but its own log: a line for each request,
    and the metric log.
    """
    place = directory / "tsx-torchserve"
    place.mkdir(exist_ok=True)
    with _torchserve_command(
        "tsx-torchserve", [TSX.with_name("torchserve")], place, archive, patience=20
    ) as server:
        yield server


@contextmanager
def _torchserve_command(
    name: str, command: list[str | Path], place: Path, archive: Path, patience: float
) -> Iterator[Server]:
    inference, management, metrics, grpc, grpc_management = free_ports(5)
    (place / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{inference}\nmanagement_address=http://127.0.0.1:{management}\n"
        f"metrics_address=http://127.0.0.1:{metrics}\ngrpc_inference_port={grpc}\ngrpc_management_port={grpc_management}\n"
        f"model_store={archive.parent}\nload_models={archive.name}\njob_queue_size=1000\n"
        "disable_token_authorization=true\ndisable_system_metrics=true\n"
    )
    command = [
        *command,
        "--start",
        "--foreground",
        "--ncs",
        "--ts-config",
        place / "config.properties",
    ]
    environment = foreign_environment() | {
        "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
        "TEMP": str(place),
        "TMPDIR": str(place),  # of the file with its pid
        "LOG_LOCATION": str(place),
        "TSX_CACHE_DIR": str(place / "cache"),
    }
    with running(command, place, environment, name.lower(), patience) as process:
        yield Server(
            name, process, f"http://127.0.0.1:{inference}", f"http://127.0.0.1:{management}"
        )


@contextmanager
def running(
    command: Sequence[str | Path],
    directory: Path,
    environment: dict[str, str],
    name: str,
    patience: float = 20,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all that it starts; whatever is left of them `patience` seconds after the end
    is killed.
    """
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
            _, left = psutil.wait_procs(members, timeout=patience)
            for member in left:
                member.kill()
            process.wait()


def first_answer(server: Server, path: str, body: bytes | None) -> bytes:
    """The first answer; asks again at once while nothing listens, or the model is not there yet."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return server.call(path, body)
        except OSError as error:
            waits = not isinstance(error, urllib.error.HTTPError) or error.code in (404, 503)
            if not waits or server.process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def foreign_environment() -> dict[str, str]:
    """For programs of another Python environment: where this one finds its modules is nothing to
    them.
    """
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
    """Pack an archive by tsx's `torch-model-archiver`, or by the program that is named: every
    server here reads either.
    """
    if config is not None:
        (directory / "model-config.yaml").write_text(json.dumps(config))  # JSON is YAML
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
