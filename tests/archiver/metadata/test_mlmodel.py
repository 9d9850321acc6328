"""MLflow's MLmodel file: the handler it implies, and a sample request that fits its signature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.mlmodel import (
    FILE,
    PYFUNC,
    PYTORCH,
    MLmodel,
    SignatureTensor,
    read_mlmodel,
)

BOTH_FLAVORS = {"python_function": {}, "pytorch": {"model_data": "data"}}


def tensor(*shape: int, dtype: str = "float32", name: str | None = None) -> dict[str, Any]:
    return {"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": list(shape)}} | (
        {"name": name} if name else {}
    )


def model(*inputs: dict[str, Any], flavors: dict[str, Any] = BOTH_FLAVORS) -> MLmodel:
    return MLmodel({"flavors": flavors, "signature": {"inputs": json.dumps(inputs)}})


def test_a_pytorch_model_whose_rows_can_be_batched_needs_only_torch() -> None:
    mlmodel = model(tensor(-1, 3, -1, name="pixels"), tensor(-1, dtype="int64", name="size"))
    assert mlmodel.tensors == (
        SignatureTensor("pixels", "float32", (3, None)),
        SignatureTensor("size", "int64", ()),
    )
    assert (mlmodel.handler, mlmodel.flavor) == (PYTORCH, "pytorch")


@pytest.mark.parametrize(
    "mlmodel",
    [
        model(),
        MLmodel({"flavors": BOTH_FLAVORS}),
        model(tensor(2, 4)),
        model(tensor(-1, 4, dtype="str")),
        model({"type": "double", "name": "a"}),
        model(tensor(-1, 4), flavors={"python_function": {}, "onnx": {}}),
    ],
)
def test_every_other_model_is_loaded_with_mlflow(mlmodel: MLmodel) -> None:
    assert mlmodel.handler == PYFUNC


def test_the_error_of_a_model_without_a_loader_tells_how_to_log_it() -> None:
    with pytest.raises(CannotPack, match="Log it with a signature"):
        _ = model(flavors={"pytorch": {}}).handler


def test_a_sample_request_has_the_columns_of_the_signature() -> None:
    columns = [{"type": "double", "name": "a"}, {"type": "string", "name": "b"}]
    assert model(*columns).example == {
        "dataframe_split": {"columns": ["a", "b"], "data": [[0.0, "text"]]}
    }
    assert model({"type": "long"}).example == {"inputs": [[0]]}
    assert model({"type": "array", "name": "a"}).example is None
    assert model(tensor(-1, 4)).example is None
    assert model().example is None


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "flavors: {}",
        "flavors: [a]",
        "flavors: {onnx: 1}",
        "flavors: {onnx: {data: ../../model.onnx}}",
        "flavors: {python_function: {code: /usr/lib/python3}}",
        "flavors: {python_function: {artifacts: {x: {path: /etc/passwd, uri: s3://bucket/x}}}}",
        "flavors: {onnx: {}}\nsignature: {inputs: '{'}",
        "flavors: {onnx: {}}\nsignature: {inputs: '[1]'}",
        "flavors: {onnx: {}}\nsignature: {inputs: '[{\"tensor-spec\": [1]}]'}",
    ],
)
def test_a_file_that_is_not_an_mlmodel_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CannotPack, match="does not describe a model"):
        read_mlmodel(tmp_path)


def test_artifact_uris_and_model_settings_are_not_checked_as_paths(
    tmp_path: Path,
) -> None:
    text = "flavors: {python_function: {code: null, artifacts: {x: {path: artifacts/x, uri: /home/me/x}}, model_config: {index: /data}}}"
    (tmp_path / FILE).write_text(text)
    assert read_mlmodel(tmp_path).flavor == "python_function"
