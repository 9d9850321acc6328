"""`ts.launcher`: start and stop a server from a script or a test, as `torchserve` does."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO

import requests

from tsx_cli.serve.torchserve import READY
from tsx_runtime.worker.handler_api.ts_shim import refuse

__getattr__ = partial(refuse, __name__)

MANAGEMENT = "http://localhost:8081/models"
MAX_LINES = 1000  # number of output lines that are kept after the start

_TORCHSERVE = [
    sys.executable,
    "-c",
    "import sys; from tsx_cli.serve.torchserve import main; sys.exit(main())",
]


def start(
    model_store: str | None = None,
    snapshot_file: str | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | None = None,
    disable_token: bool = False,
    models: str | Sequence[str] | None = None,
    enable_model_api: bool = False,
) -> queue.Queue[str]:
    """Stop the running server, start another one, and wait until it is ready.

    The output of the start is printed.

    Returns:
        A queue of the lines that the server prints later. A full queue drops its oldest line.

    Raises:
        RuntimeError: The server ended before it was ready.
    """
    stop()
    arguments = _arguments(model_store, snapshot_file, plugin_folder, models)
    switches = {
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
    }
    arguments += [flag for flag, is_on in switches.items() if is_on]
    process = subprocess.Popen(
        [*_TORCHSERVE, "--start", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        print(line, end="", flush=True)
        output.append(line)
        if line.strip() == READY:
            break
    else:
        raise RuntimeError(
            f"the server did not start; the command ended with {process.wait()}:"
            f" {''.join(output[-20:])}"
        )
    process.wait()  # Only the command ends; the server continues.
    lines: queue.Queue[str] = queue.Queue(MAX_LINES)
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    return lines


def stop(wait: bool = True) -> None:
    """Stop the running server.

    The command always waits until the server has ended, so that the next server finds its ports
    free.

    Args:
        wait: Whether to pass --foreground, as TorchServe's launcher does.
    """
    subprocess.run([*_TORCHSERVE, "--stop", *["--foreground"] * wait], check=False)


def register_model(model_name: str, url: str) -> requests.Response:
    """Register a model with one worker, and wait until it is ready."""
    return register_model_with_params(
        {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    )


def register_model_with_params(params: Mapping[str, str]) -> requests.Response:
    """Register a model at the default address of the management API."""
    return requests.post(MANAGEMENT, params=dict(params))


def _arguments(
    model_store: str | None,
    snapshot_file: str | None,
    plugin_folder: str | None,
    models: str | Sequence[str] | None,
) -> list[str]:
    options = {
        "--model-store": model_store,
        "--ts-config": snapshot_file,
        "--plugins-path": plugin_folder,
    }
    arguments = [text for flag, value in options.items() if value for text in (flag, str(value))]
    if models:
        arguments += ["--models", *([models] if isinstance(models, str) else models)]
    return arguments


def _read_lines(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Read until the stream ends, because a full pipe would stall the server."""
    for line in stream:
        if lines.full():
            lines.get_nowait()
        lines.put_nowait(line)
