"""`tsx archive` of a model without a handler prints a request, and the request works."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from tests.runtime.conftest import make_settings, running_server
from tsx_cli.archive.example import request_line
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.shared.example_requests import ExampleInput, example_body

pytestmark = pytest.mark.usefixtures("processes")


def test_the_line_that_is_printed_works(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grey = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 26 * 26, 3))
    torch.jit.script(grey.eval()).save(tmp_path / "grey.pt")
    torch.jit.script(torch.nn.Linear(4, 3)).save(tmp_path / "short.pt")
    with running_server(make_settings(tmp_path)) as server:
        monkeypatch.setenv("TSX_INFERENCE_ADDRESS", server.addresses["inference"])
        ended = run("archive", "grey.pt", "short.pt")
        lines = [line.partition("in another terminal: ")[2] for line in ended.out.splitlines() if "another terminal" in line]
        assert [line.split(" | ")[0] for line in lines[:1]] == ["python3 -c 'print([[[0]*28]*28])'"]
        assert lines[1].endswith("/predictions/short -H 'Content-Type: application/json' -d '[0, 0, 0, 0]'")
        assert "try it: tsx serve grey.mar\n" in ended.out
        for name, line in zip(("grey", "short"), lines, strict=True):
            server.register(f"{name}.mar", initial_workers=1)
            answer = subprocess.run(["bash", "-c", line], capture_output=True, check=True, text=True)
            assert len(json.loads(answer.stdout)) == 3, answer


@pytest.mark.parametrize("size", [1, 1000])
def test_the_line_reaches_a_socket_and_runs_nothing_that_a_model_names(size: int) -> None:
    settings, _ = load_settings({"inference_address": "unix:/run/tsx.sock"}, {})
    name = "x'$(id)"
    body = example_body([ExampleInput(name, None, (size,)), ExampleInput("y", None, (1,))])
    line = request_line("m", body, settings)
    assert "curl --unix-socket /run/tsx.sock http://localhost/predictions/m " in line
    command = line.partition(" | ")[0].replace("curl", "echo", 1)
    printed = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True).stdout
    assert f'{{"instances": [{{"{name}": [0' in printed


def test_a_model_that_does_not_load_here_is_packed_without_a_request(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
    )
    torch.save({"other": torch.zeros(1)}, tmp_path / "net.pth")
    (packed,) = json.loads(run("archive", "net.pth", "--model-file", "model.py", "--json").out)
    assert (packed["archive"], packed["request"]) == ("net.mar", None)
    (warning,) = packed["warnings"]
    assert warning.startswith("net does not load on this machine: net.pth does not fit model.py: 2 missing keys")
    ended = run("archive", "net.pth", "--model-file", "model.py", "--force")
    assert f"Warning: {warning}" in ended.err
    assert ended.out.endswith("try it: tsx serve net.mar\n")


def test_a_request_that_is_answered_with_an_error_is_not_printed(run: Run, tmp_path: Path) -> None:
    model = torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(4, 4), Spectrum()), torch.zeros(1, 4))
    model.save(tmp_path / "spectrum.pt")  # its answers are complex numbers, which JSON has not
    ended = run("archive", "spectrum.pt")
    assert "try it: tsx serve spectrum.mar\n" in ended.out
    assert "another terminal" not in ended.out


class Spectrum(torch.nn.Module):
    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(signal)
