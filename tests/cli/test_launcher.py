"""`ts.launcher`, as called by TorchServe's tests and its users' scripts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import make_model
from tests.support.servers import DEADLINE, clean
from tsx_cli.serve.torchserve import READY

pytest.importorskip("requests")
SHIMS = Path(__file__).parents[2] / "packages" / "tsx-serve-torchserve-shims" / "src"
ECHO = "def handle(data, context):\n    return [bytes(next(iter(row.values()))) for row in data or []]\n"

SCRIPT = """
import sys
import requests
sys.path.insert(0, sys.argv[1])
from ts import launcher
inference, launcher.MANAGEMENT = sys.argv[2:]
start = {"model_store": "store", "snapshot_file": "config.properties", "no_config_snapshots": True, "disable_token": True}
for _ in range(2):  # the second call stops the first server
    launcher.start(**start, models="echo=echo.mar", enable_model_api=True, plugin_folder="plugins")
print("registered", launcher.register_model("other", "echo.mar").status_code)
for model in ("echo", "other"):
    print(model, requests.post(f"{inference}/predictions/{model}", data=b"hello").text)
launcher.stop()
try:
    launcher.start(model_store="none", disable_token=True, enable_model_api=True)
except RuntimeError as error:
    print("failed", error)
"""


@pytest.mark.usefixtures("processes")
def test_a_script_starts_calls_and_stops_a_server(
    short_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    for directory in ("store", "tmp"):
        (short_path / directory).mkdir()
    make_model(short_path / "store" / "echo.mar", ECHO)
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in free_ports(3))
    addresses = f"inference_address={inference}\nmanagement_address={management}\nmetrics_address={metrics}\n"
    (short_path / "config.properties").write_text(addresses)
    environment = clean(
        {
            "TMPDIR": str(short_path / "tmp"),
            "TSX_CACHE_DIR": str(short_path / "cache"),
            "TSX_WORKER_PRELOAD": "false",
        }
    )
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(SHIMS), inference, f"{management}/models"],
        cwd=short_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert [line for line in lines if line.startswith("TorchServe")] == [
        "TorchServe is not currently running.",
        "TorchServe has stopped.",
        "TorchServe has stopped.",
        "TorchServe is not currently running.",
    ]
    assert lines.count(READY) == 2
    assert [line for line in lines if line.startswith(("registered", "echo", "other"))] == [
        "registered 200",
        "echo hello",
        "other hello",
    ]
    assert "ended with 1: --model-store directory" in finished.stdout
    assert not (short_path / "tmp" / ".model_server.pid").exists()
