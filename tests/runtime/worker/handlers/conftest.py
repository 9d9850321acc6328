"""Small models in all supported formats."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.runtime.worker.conftest import ORDER
from tsx_runtime.worker import model_loading


def torch_bytes(value: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def script_bytes(module: torch.nn.Module) -> bytes:
    """Return a module as the bytes of a TorchScript file."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    return file.getvalue()


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    """Return an image as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]  # torch's modules


# the content of a model file
MODEL = f"import torch\n\n\n{inspect.getsource(Net)}"


@pytest.fixture(scope="session")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="session")
def model_bytes(net: Net, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the contents of model files in each format, by name."""
    directory = tmp_path_factory.mktemp("models")
    state, example = net.state_dict(), torch.zeros(2, 3)
    torch.save(state, directory / "weights.pth")
    torch.save(state, directory / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "state_dict": state}, directory / "checkpoint.pth")
    torch.save({"epoch": 3, "model": state, "ema": state}, directory / "two.pth")
    torch.save(
        {f"module.{name}": value for name, value in state.items()}, directory / "parallel.pth"
    )
    torch.save(
        {name: value for name, value in state.items() if name != "last.bias"},
        directory / "less.pth",
    )
    torch.save({**state, "last.weight": torch.zeros(5, 8)}, directory / "wide.pth")
    torch.save({name: value.double() for name, value in state.items()}, directory / "double.pth")
    torch.save([1, 2], directory / "list.pth")
    torch.jit.save(torch.jit.trace(net, example), directory / "script.pt")
    torch.jit.save(torch.jit.freeze(torch.jit.trace(net, example)), directory / "frozen.pt")
    batch = torch.export.Dim("batch")
    torch.export.save(
        torch.export.export(net, (example,), dynamic_shapes=({0: batch},)),
        directory / "program.pt2",
    )
    from safetensors.torch import save_file

    save_file(state, directory / "weights.safetensors")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="session")
def onnx_bytes(net: Net) -> bytes:
    """Return the model as ONNX, made node by node, since exporting needs onnxscript."""
    from onnx import TensorProto, helper, numpy_helper

    weights = {name: value.numpy() for name, value in net.state_dict().items() if value.ndim}
    nodes = [
        helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["a"], transB=1),
        helper.make_node(
            "BatchNormalization",
            ["a", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"],
            ["b"],
            epsilon=1e-5,
        ),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Gemm", ["c", "last.weight", "last.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.fixture
def load_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that loads a model in this process, with the given `load_entry`."""
    for name in ("_apply_resources", "_enter_directory", "_limit_threads"):
        monkeypatch.setattr(model_loading, name, lambda *_: None)
    monkeypatch.setattr(model_loading.ts_shim, "install", lambda: None)

    def load(load_entry: Callable[..., Any], **order: Any) -> Any:
        monkeypatch.setattr(model_loading, "load_entry", load_entry)
        paths = {"model_dir": str(tmp_path), "manifest": {}, "model_config": "{}"}
        return model_loading.load_model({**ORDER, **paths, **order})  # type: ignore[arg-type]

    return load
