"""`tsx archive` of a model without a handler prints a request that works."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from tests.runtime.conftest import make_settings, running_server
from tsx_cli.archive.example import NOT_ASKED, request_line
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.shared.example_requests import ExampleInput, example_body

pytestmark = pytest.mark.usefixtures("processes")


def test_the_printed_request_works(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grey_image_model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 26 * 26, 3)
    )
    torch.jit.script(grey_image_model.eval()).save(tmp_path / "grey.pt")
    torch.jit.script(torch.nn.Linear(4, 3)).save(tmp_path / "short.pt")
    with running_server(make_settings(tmp_path)) as server:
        monkeypatch.setenv("TSX_INFERENCE_ADDRESS", server.addresses["inference"])
        result = run("archive grey.pt short.pt")
        lines = [
            line.partition("in another terminal: ")[2]
            for line in result.out.splitlines()
            if "another terminal" in line
        ]
        assert [line.split(" | ")[0] for line in lines[:1]] == ["python3 -c 'print([[[0]*28]*28])'"]
        assert lines[1].endswith(
            "/predictions/short -H 'Content-Type: application/json' -d '[0, 0, 0, 0]'"
        )
        assert "try it: tsx serve grey.mar\n" in result.out
        for name, line in zip(("grey", "short"), lines, strict=True):
            server.register(f"{name}.mar", initial_workers=1)
            response = subprocess.run(
                ["bash", "-c", line], capture_output=True, check=True, text=True
            )
            assert len(json.loads(response.stdout)) == 3, response


@pytest.mark.parametrize("size", [1, 1000])
def test_the_printed_request_quotes_names_and_reaches_a_unix_socket(size: int) -> None:
    settings, _ = load_settings({"inference_address": "unix:/run/tsx.sock"}, {})
    name = "x'$(id)"
    body = example_body([ExampleInput(name, None, (size,)), ExampleInput("y", None, (1,))])
    line = request_line("m", body, settings)
    assert "curl --unix-socket /run/tsx.sock http://localhost/predictions/m " in line
    command = line.partition(" | ")[0].replace("curl", "echo", 1)
    echoed_text = subprocess.run(
        ["bash", "-c", command], capture_output=True, check=True, text=True
    ).stdout
    assert f'{{"instances": [{{"{name}": [0' in echoed_text


def test_weights_that_do_not_fit_are_refused_unless_unchecked(run: Run) -> None:
    Path("model.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n"
    )
    torch.save({"other": torch.zeros(1)}, "net.pth")
    arguments = "archive net.pth --model-file model.py --json"
    result = run(arguments)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("Error: net does not load: net.pth does not fit model.py")
    assert '"weight", "bias"' in result.err
    assert not Path("net.mar").exists()
    (report,) = json.loads(run(f"{arguments} --no-check").out)
    assert (report["archive"], report["request"], report["warnings"]) == ("net.mar", None, [])


HANDLER_TEMPLATE = "class Own:\n    def initialize(self, context): {}\n    def handle(self, {}): return data and [1 / len(data[0])]\n"
PACK_COMMAND = "archive --name own --handler own.py"
INVALID_HANDLERS = {
    "no handle": (
        "class Own:\n    def initialize(self, context): pass\n",
        "Class Own of handler own.py has no method handle",
    ),
    "a function of one argument": (
        "def handle(data): return data\n",
        "is called with (data, context), which it does not take",
    ),
    "no handle, and a name of what is missing": (
        "class CudaInstaller:\n    def initialize(self, context): pass\n",
        "Class CudaInstaller of handler own.py has no method handle",
    ),
    "a method of one argument": (
        HANDLER_TEMPLATE.format("pass", "data"),
        "Own.handle of handler own.py is called with (data, context)",
    ),
    "a failure to load": (
        HANDLER_TEMPLATE.format("open('gone.txt')", "data, context"),
        "The archive does not contain 'gone.txt'",
    ),
    "a sample that fails": (
        "def handle(data, context): return data and [1 / 0]\n",
        "answers samples/one.json with 500: Prediction failed",
    ),
}


@pytest.mark.parametrize("fault", INVALID_HANDLERS)
def test_a_broken_handler_is_not_packed(run: Run, fault: str) -> None:
    code, reason = INVALID_HANDLERS[fault]
    Path("own.py").write_text(code)
    Path("one.json").write_text("[1]")
    arguments = f"{PACK_COMMAND} --sample one.json"
    result = run(arguments)
    assert result.code == 1, result
    assert reason in result.err
    assert "--no-check packs it" in result.err
    assert not Path("own.mar").exists()
    assert run(f"{arguments} --no-check").code == 0


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import no_such_library", "'no_such_library'"),
        (
            "raise RuntimeError('Found no NVIDIA driver on your system')",
            "Found no NVIDIA driver on your system",
        ),
    ],
)
def test_a_requirement_that_this_machine_lacks_gets_only_a_note(
    run: Run, code: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_cli.archive.example.gpu_count", lambda: 0)
    Path("own.py").write_text(HANDLER_TEMPLATE.format(code, "data, context"))
    result = run(PACK_COMMAND)
    assert result.code == 0, result
    assert "note: own does not load on this machine" in result.out
    assert note in result.out


def test_an_image_classifier_must_accept_an_image(run: Run, tmp_path: Path) -> None:
    for name, channels in (("grey", 1), ("colour", 3)):
        network = torch.nn.Sequential(
            torch.nn.Conv2d(channels, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        )
        torch.jit.script(network.eval()).save(tmp_path / f"{name}.pt")
    result = run("archive grey.pt --handler image_classifier")
    assert (result.code, (tmp_path / "grey.mar").exists()) == (1, False)
    assert "(image/png) with 500: RuntimeError" in result.err
    assert "to have 1 channels, but got 3" in result.err
    assert run("archive colour.pt --handler image_classifier").code == 0


def test_a_large_model_is_loaded_only_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsx_cli.archive.example.MAX_LOADED_BYTES", 10)
    Path("own.py").write_text(HANDLER_TEMPLATE.format("1 / 0", "data, context"))
    result = run(PACK_COMMAND)
    assert (result.code, "more than 10 bytes" in result.out) == (0, True), result


def test_a_failing_request_is_not_printed(run: Run, tmp_path: Path) -> None:
    model = torch.jit.trace(
        torch.nn.Sequential(torch.nn.Linear(4, 4), Spectrum()), torch.zeros(1, 4)
    )
    # Its responses are complex numbers, which JSON cannot express.
    model.save(tmp_path / "spectrum.pt")
    result = run("archive spectrum.pt")
    # The model may expect other values than the generated numbers, so packing succeeds.
    assert result.code == 0
    assert "(application/json) with 5" in result.out
    assert "try it: tsx serve spectrum.mar\n" in result.out
    assert "another terminal" not in result.out


class Spectrum(torch.nn.Module):
    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(signal)


def test_a_model_without_a_request_gets_a_note(run: Run) -> None:
    Path("own.py").write_text("def handle(data, context): return data and [1 / 0]\n")
    result = run(PACK_COMMAND)
    assert (result.code, NOT_ASKED in result.out) == (0, True), result


def test_a_check_without_samples_sends_the_generated_request(run: Run) -> None:
    torch.jit.script(torch.nn.Linear(4, 3)).save("short.pt")
    result = run("archive short.pt --check")
    assert (result.code, "1 sample got the same answers" in result.out) == (0, True), result


@pytest.mark.parametrize(
    ("layer", "is_image"),
    [
        (torch.nn.Conv2d(3, 1, 3), True),
        (torch.nn.Conv2d(1, 1, 3), False),
        (torch.nn.Linear(4, 3), False),
    ],
)
def test_the_image_handler_is_suggested_only_for_image_models(
    run: Run, layer: torch.nn.Module, is_image: bool
) -> None:
    torch.jit.script(layer).save("net.pt")
    assert ("image_classifier accepts images" in run("archive net.pt").out) is is_image
