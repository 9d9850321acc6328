"""The external weight files of ONNX models from torch, optimum and the onnx library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tsx_archiver import ArchiveSpec, open_archive, write_archive
from tsx_archiver.errors import InputMissing, UnsafePath
from tsx_archiver.metadata.onnx_file import data_files

LOCATIONS = ["lin.onnx.data", "model.onnx_data", "w/0.bin"]


def external(location: str, name: str = "w") -> Any:
    tensor = helper.make_tensor(name, TensorProto.FLOAT, [1], [0.0])
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "4")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def model(*tensors: Any, nodes: Any = ()) -> Any:
    return helper.make_model(
        helper.make_graph(
            [helper.make_node("Relu", ["x"], ["y"]), *nodes], "graph", [], [], list(tensors)
        )
    )


def write(path: Path, content: Any) -> Path:
    path.write_bytes(content.SerializeToString())
    return path


def test_each_external_data_file_is_packed_under_its_path(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "lin.onnx", model(*(external(location) for location in LOCATIONS)))
    for location in LOCATIONS:
        (tmp_path / location).parent.mkdir(exist_ok=True)
        (tmp_path / location).write_bytes(location.encode())
    (tmp_path / "other.txt").write_text("not of the model")
    archive = write_archive(
        ArchiveSpec("m", "base_handler", serialized_file=path), tmp_path / "out"
    )
    with open_archive(archive, cache=tmp_path / "cache") as opened:
        assert {name: (opened.directory / name).read_text() for name in LOCATIONS} == {
            name: name for name in LOCATIONS
        }
        assert sorted(opened.manifest.checksums) == sorted(["lin.onnx", *LOCATIONS])
    digest = opened.digest
    (tmp_path / "w" / "0.bin").write_bytes(b"trained anew")
    write_archive(
        ArchiveSpec("m", "base_handler", serialized_file=path), tmp_path / "out", force=True
    )
    with open_archive(archive, cache=tmp_path / "cache") as opened:
        assert opened.digest != digest
        assert (opened.directory / "w" / "0.bin").read_text() == "trained anew"


def test_a_model_among_the_extra_files_includes_its_weights(tmp_path: Path) -> None:
    (tmp_path / "parts" / "nets").mkdir(parents=True)
    path = write(tmp_path / "parts" / "nets" / "encoder.onnx", model(external("e.data")))
    path.with_name("e.data").write_text("weights")
    for extra, name in ((tmp_path / "parts", "nets/e.data"), (path, "e.data")):
        archive = write_archive(
            ArchiveSpec("m", "base_handler", extra_files=[extra]), tmp_path, force=True
        )
        with open_archive(archive, cache=tmp_path / "cache") as opened:
            assert (opened.directory / name).read_text() == "weights"


def test_a_missing_weight_file_is_an_error_unless_an_extra_file_replaces_it(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "lin.onnx", model(external("lin.onnx.data")))
    with pytest.raises(InputMissing, match=r"weights in lin\.onnx\.data"):
        write_archive(ArchiveSpec("m", "base_handler", serialized_file=path), tmp_path)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "lin.onnx.data").write_text("moved")
    archive = write_archive(
        ArchiveSpec("m", "base_handler", serialized_file=path, extra_files=[tmp_path / "moved"]),
        tmp_path,
    )
    with open_archive(archive, cache=tmp_path / "cache") as opened:
        assert (opened.directory / "lin.onnx.data").read_text() == "moved"


@pytest.mark.parametrize(
    "location", ["../secret", "w/../../secret", "/etc/passwd", "..\\secret", "link", ""]
)
def test_a_file_outside_the_models_directory_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "link").symlink_to(tmp_path / "secret")
    path = write(tmp_path / "m" / "lin.onnx", model(external(location)))
    with pytest.raises(UnsafePath, match=r"lin\.onnx has weights in .* refused"):
        data_files(path)
    with pytest.raises(UnsafePath):
        write_archive(ArchiveSpec("m", "base_handler", serialized_file=path), tmp_path)


def test_links_of_the_hugging_face_cache_are_followed(
    tmp_path: Path,
) -> None:
    for directory in ("blobs", "snapshots"):
        (tmp_path / directory).mkdir()
    write(tmp_path / "blobs" / "aa", model(external("model.onnx_data")))
    (tmp_path / "blobs" / "bb").write_text("weights")
    (tmp_path / "snapshots" / "model.onnx").symlink_to("../blobs/aa")
    (tmp_path / "snapshots" / "model.onnx_data").symlink_to("../blobs/bb")
    assert [
        path.read_text() for path in data_files(tmp_path / "snapshots" / "model.onnx").values()
    ] == ["weights"]


def test_tensors_are_found_in_every_part_of_a_model(tmp_path: Path) -> None:
    inner = helper.make_graph([], "inner", [], [], [external("subgraph")])
    nodes = [
        helper.make_node("If", ["c"], ["z"], then_branch=inner),
        helper.make_node(
            "Constant", [], ["k"], value=external("constant"), alpha=0.5, beta=[1.0, 2.0]
        ),
    ]
    proto = model(external("initializer"), nodes=nodes)
    sparse = onnx.SparseTensorProto(
        values=external("values"), indices=external("indices"), dims=[4]
    )
    proto.graph.sparse_initializer.append(sparse)
    proto.graph.node[-1].attribute.add(
        name="many", type=onnx.AttributeProto.TENSORS, tensors=[external("list")]
    )
    function = [helper.make_node("Constant", [], ["k"], value=external("function"))]
    proto.functions.append(helper.make_function("own", "F", [], ["k"], function, []))
    proto.metadata_props.add(key="location", value="/not/a/tensor")
    proto.graph.node[0].metadata_props.add(key="j", value="j")
    proto.graph.node[0].metadata_props.add(key="location", value="/not/a/tensor/either")
    proto.graph.initializer.append(external(long := "d/" * 70 + "long"))
    proto.graph.initializer.append(
        helper.make_tensor("text", TensorProto.STRING, [1], [b"\n\x08location\x12\x01/"])
    )
    names = {"constant", "function", "indices", "initializer", "list", long, "subgraph", "values"}
    assert set(data_files(write(tmp_path / "m.onnx", proto))) == names


def test_other_model_files_have_no_external_weights(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(1000))
    assert data_files(tmp_path / "weights.bin") == {}
