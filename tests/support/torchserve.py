"""The `torchserve` command as scripts call it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support import forked
from tests.support.servers import DEADLINE, clean
from tsx_cli.serve.background import end_server, find_server
from tsx_cli.serve.torchserve import READY

START = ["--start", "--disable-token-auth", "--enable-model-api"]


class TorchServe:
    """The command with its own directory and pid file."""

    def __init__(self, directory: Path, ports: list[int]) -> None:
        self.directory = directory
        self.inference, self.management, self.metrics = (
            f"http://127.0.0.1:{port}" for port in ports
        )
        self.pid_file = directory / "tmp" / ".model_server.pid"
        self.environment = clean(
            {
                "TMPDIR": str(directory / "tmp"),
                "TSX_CACHE_DIR": str(directory / "cache"),
                "TSX_WORKER_PRELOAD": "false",
            }
        )
        (directory / "tmp").mkdir()
        (directory / "store").mkdir()

    def configure(self, *lines: str) -> None:
        addresses = [
            f"{role}_address={getattr(self, role)}"
            for role in ("inference", "management", "metrics")
        ]
        (self.directory / "config.properties").write_text(
            "\n".join([*addresses, "model_store=store", "enable_grpc=false", *lines]) + "\n"
        )

    def call(self, *arguments: str) -> tuple[int, str, str]:
        """Make a call that ends and leaves no process running."""
        result = forked.run(
            self._command(arguments),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        return result.returncode, result.stdout, result.stderr

    def start(self, *arguments: str) -> tuple[int, list[str]]:
        """Read the output until the server has started, as TorchServe's launcher does.

        Return the exit code of the command, and the lines.
        """
        with open(self.directory / "stderr", "w") as errors:
            process = forked.Popen(
                self._command(arguments),
                cwd=self.directory,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        killer = threading.Timer(DEADLINE, process.kill)
        killer.start()
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if lines[-1] == READY:
                break
        process.stdout.close()
        try:
            return process.wait(DEADLINE), lines
        finally:
            killer.cancel()

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    @property
    def server(self) -> psutil.Process:
        process = find_server(self.pid_file)
        assert process is not None, self.stderr
        return process

    def describe(self, model: str) -> dict[str, Any]:
        description: dict[str, Any] = json.loads(
            self.request("GET", f"{self.management}/models/{model}")
        )[0]
        return description

    def request(self, method: str, url: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(
            urllib.request.Request(
                url, body, {"Content-Type": "application/octet-stream"}, method=method
            ),
            timeout=DEADLINE,
        ) as answer:
            content: bytes = answer.read()
            return content

    def snapshots(self) -> list[str]:
        return [
            path.stem.partition("-")[2]
            for path in sorted((self.directory / "logs" / "config").iterdir())
        ]

    def end(self) -> None:
        if (process := find_server(self.pid_file)) is not None:
            process.kill()
            end_server(process)  # waits for its end

    @staticmethod
    def _command(arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "tsx_cli.serve.torchserve", *arguments]
