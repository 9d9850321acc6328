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
LINES = 1000  # of what the server says later that are kept

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
    """Stop the server that runs, start one, and wait until it answers; what it says until then is
    printed, later lines are in the queue.

    Raises RuntimeError where it ends before.
    """
    stop()
    words = _words(model_store, snapshot_file, plugin_folder, models)
    switches = {
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
    }
    words += [flag for flag, wanted in switches.items() if wanted]
    process = subprocess.Popen(
        [*_TORCHSERVE, "--start", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line)
        if line.strip() == READY:
            break
    else:
        raise RuntimeError(
            f"the server did not start; the command ended with {process.wait()}:"
            f" {''.join(said[-20:])}"
        )
    process.wait()  # the command; the server goes on
    lines: queue.Queue[str] = queue.Queue(LINES)
    threading.Thread(target=_keep_reading, args=(process.stdout, lines), daemon=True).start()
    return lines


def stop(wait: bool = True) -> None:
    """`wait` is as it was; the command waits in any case, so that a server that is started next
    finds its ports free.
    """
    subprocess.run([*_TORCHSERVE, "--stop", *["--foreground"] * wait], check=False)


def register_model(model_name: str, url: str) -> requests.Response:
    return register_model_with_params(
        {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    )


def register_model_with_params(params: Mapping[str, str]) -> requests.Response:
    """At the management API's usual address."""
    return requests.post(MANAGEMENT, params=dict(params))


def _words(
    model_store: str | None,
    snapshot_file: str | None,
    plugin_folder: str | None,
    models: str | Sequence[str] | None,
) -> list[str]:
    given = {
        "--model-store": model_store,
        "--ts-config": snapshot_file,
        "--plugins-path": plugin_folder,
    }
    words = [word for flag, value in given.items() if value for word in (flag, str(value))]
    if models:
        words += ["--models", *([models] if isinstance(models, str) else models)]
    return words


def _keep_reading(stream: IO[str], lines: queue.Queue[str]) -> None:
    """A pipe that nobody reads would fill up; of what nobody takes out of the queue, the oldest
    go.
    """
    for line in stream:
        if lines.full():
            lines.get_nowait()
        lines.put_nowait(line)
