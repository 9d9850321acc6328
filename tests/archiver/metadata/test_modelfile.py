"""Model files written by the installed torch and other programs, and invalid files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from tests.support import forked
from tsx_archiver import ArchiveSpec, describe_model_file, inspect_archive, write_archive
from tsx_archiver.errors import InputMissing

# A subprocess imports torch, so that the process of the tests need not.
WRITE_WITH_TORCH = """
import sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)

net = Net().eval()
torch.save(net.state_dict(), "state.pth")
torch.save(net.state_dict(), "legacy.pth", _use_new_zipfile_serialization=False)
torch.save({"model": net.state_dict(), "epoch": 3}, "checkpoint.pt")
torch.save(net, "whole.pth")
torch.save(net, "whole_legacy.pth", _use_new_zipfile_serialization=False)
torch.save(nn.Linear(2, 2), "layer.pth")
torch.jit.script(net).save("script.pt")
torch.jit.trace(net, torch.zeros(1, 4)).save("trace.pt")
torch.export.save(torch.export.export(net, (torch.zeros(8, 4),)), "program.pt2")
rows = ({0: torch.export.Dim("rows")},)
torch.export.save(torch.export.export(net, (torch.zeros(8, 4),), dynamic_shapes=rows), "dynamic.pt2")
"""


@pytest.fixture(scope="module")
def torch_files(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torch")
    (directory / "write.py").write_text(WRITE_WITH_TORCH)  # TorchScript reads the source
    result = forked.run(
        [sys.executable, "write.py"], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return directory


@pytest.mark.parametrize(
    ("name", "kind", "detail", "whole_object"),
    [
        ("state.pth", "eager", "weights", None),
        ("legacy.pth", "eager", "torch before 1.6", None),
        ("checkpoint.pt", "eager", "weights", None),
        ("whole.pth", "eager", "a whole pickled", "__main__.Net"),
        ("whole_legacy.pth", "eager", "torch before 1.6, a whole pickled", "__main__.Net"),
        ("layer.pth", "eager", "a whole pickled", "torch.nn.modules.linear.Linear"),
        ("script.pt", "torchscript", "", None),
        ("trace.pt", "torchscript", "", None),
        ("program.pt2", "exported", "takes batches of exactly 8", None),
        ("dynamic.pt2", "exported", "", None),
    ],
)
def test_torch_files_are_recognized_by_their_content(
    torch_files: Path, tmp_path: Path, name: str, kind: str, detail: str, whole_object: str | None
) -> None:
    path = tmp_path / "renamed.bin"
    shutil.copy(torch_files / name, path)
    description = describe_model_file(path)
    assert (description.kind, description.whole_object, description.problem) == (
        kind,
        whole_object,
        None,
    )
    assert detail in description.detail
    assert bool(detail) == bool(description.detail)
    assert description.size == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("m.json", b'{"learner":{"attributes":{}}', "xgboost"),
        ("m.json", b'{\n  "learner": {', "xgboost"),
        ("m.ubj", b"{L\0\0\0\0\0\0\0\x07learner{L", "xgboost"),
        ("m.txt", b"tree\nversion=v4\n", "lightgbm"),
        ("m.joblib", b"x\x9c and so on", "pickle"),
        ("m.pkl", b"\x80\x04K\x01.", "pickle"),
        ("m.pth", b"\x80\x04K\x01.", "unknown"),
        ("m.json", b'[{"nodeid": 0}]', "unknown"),
        ("m.pkl", b"version https://git-lfs.github.com/spec/v1\n", "unknown"),
    ],
)
def test_models_of_tables_are_recognized_by_their_first_bytes(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    (tmp_path / name).write_bytes(content)
    description = describe_model_file(tmp_path / name)
    assert (description.kind, description.problem is None) == (kind, kind != "unknown")
    if name == "m.json" and kind == "unknown":
        assert "write it by save_model, not by dump_model" in str(description.problem)


def test_a_file_of_skops_is_recognized_by_its_schema(tmp_path: Path) -> None:
    path = make(tmp_path / "m.bin", "1.npy", "schema.json", prefix="")
    assert describe_model_file(path).kind == "skops"


@pytest.mark.parametrize("name", ["state.pth", "legacy.pth", "script.pt", "program.pt2"])
def test_a_truncated_file_is_reported_as_truncated(
    torch_files: Path, tmp_path: Path, name: str
) -> None:
    content = (torch_files / name).read_bytes()
    path = tmp_path / name
    for length in (8, 40, len(content) // 2):
        path.write_bytes(content[:length])
        description = describe_model_file(path)
        if name == "legacy.pth" and length > 40:
            continue  # The weights follow the pickles without a length, so only loading notices the truncation.
        assert description.kind == "unknown"
        assert "truncated" in str(description.problem)


def make(path: Path, *names: str, prefix: str = "net/") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(prefix + name, b"")
    return path


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        (["serialized_exported_program.json", "version"], "exported", "before 2.7"),
        (["data/aotinductor/model/x.so", "archive_format"], "aotinductor", ""),
        (["data.pkl", "bytecode.pkl", "constants.pkl", "code/x.py"], "torchscript", "lite"),
        (["data.pkl", ".data/extern_modules"], "unknown", "torch.package"),
        (["MAR-INF/MANIFEST.json", "x.py"], "unknown", "already a model archive"),
        (["word/document.xml", "x"], "unknown", "not one that torch writes"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "net/"])
def test_zip_files_of_other_programs_are_distinguished(
    tmp_path: Path, names: list[str], kind: str, message: str, prefix: str
) -> None:
    description = describe_model_file(make(tmp_path / "x", *names, prefix=prefix))
    assert description.kind == kind
    assert message in description.detail + str(description.problem)


@pytest.fixture(scope="module")
def onnx_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "graph", values[:1], values[1:]
    )
    return bytes(helper.make_model(graph, producer_name="test").SerializeToString())


def test_onnx_is_recognized_without_a_magic_number(tmp_path: Path, onnx_model: bytes) -> None:
    assert onnx.load_from_string(onnx_model).graph.name == "graph"
    path = tmp_path / "any.name"
    path.write_bytes(onnx_model)
    assert describe_model_file(path).kind == "onnx"
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx_model[:-10])
    assert "truncated" in str(describe_model_file(path).problem)


def test_safetensors_are_recognized_and_their_tensors_counted(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    path = tmp_path / "net.safetensors"
    save_file({"a": np.zeros(3), "b": np.ones(2)}, path, metadata={"format": "pt"})
    assert (describe_model_file(path).kind, describe_model_file(path).detail) == (
        "safetensors",
        "2 tensors",
    )
    content = path.read_bytes()
    for length in (20, len(content) - 1):
        path.write_bytes(content[:length])
        assert "truncated" in str(describe_model_file(path).problem)
    path.write_bytes(struct.pack("<Q", 9) + b'{"a": [1]' + bytes(9))
    assert "header cannot be read" in str(describe_model_file(path).problem)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git lfs pull"),
        (b"  <!DOCTYPE html><html>", "web page"),
        (b"\x1f\x8b\x08" + bytes(20), "gzipped"),
        (pickle.dumps({"a": 1}, protocol=4), "not one that torch.save wrote"),
        (b"import torch\n", "is not a model file (it begins"),
        (bytes(1000), "is not a model file (it begins"),
        (b"\x08\x07\x08\x07", "is not a model file (it begins"),
        (json.dumps({"a": 1}).encode(), "is not a model file (it begins"),
    ],
)
def test_files_that_are_not_models_get_specific_messages(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    description = describe_model_file(path)
    assert description.kind == "unknown"
    assert message in str(description.problem)
    assert str(description.problem).startswith(str(path))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match=r"gone.pt cannot be read"):
        describe_model_file(tmp_path / "gone.pt")
    with pytest.raises(InputMissing, match="is a directory"):
        describe_model_file(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(InputMissing, match="is not a regular file"):
        describe_model_file(tmp_path / "pipe.pt")


def test_a_pickle_is_inspected_but_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    with zipfile.ZipFile(tmp_path / "evil.pth", "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps(Evil(), protocol=2))
        archive.writestr("evil/version", "3")
    assert describe_model_file(tmp_path / "evil.pth").kind == "eager"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("format", ["default", "zip-store", "tgz", "no-archive"])
def test_inspect_describes_the_packed_model(
    torch_files: Path, inputs: Path, tmp_path: Path, format: str
) -> None:
    path = write_archive(
        ArchiveSpec("net", "handler.py", serialized_file=torch_files / "script.pt"),
        tmp_path,
        format=format,
    )  # type: ignore[arg-type]
    description = inspect_archive(path)
    assert description.model is not None
    assert (description.model.kind, description.problems) == ("torchscript", [])
