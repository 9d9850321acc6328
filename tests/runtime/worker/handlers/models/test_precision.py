"""The setting `precision` of model-config.yaml, which converts weights but no inputs or outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.worker.conftest import StartWorker, a_request
from tests.runtime.worker.handlers.conftest import MODEL, Net
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.loader import LoadedHandler
from tsx_runtime.worker.handlers.models.model_files import (
    FixedBatch,
    load_exported,
    load_onnx,
    load_torchscript,
)
from tsx_runtime.worker.handlers.models.precision import cast, configured_precision, in_precision

CPU = torch.device("cpu")
QUESTIONS = [[1.0, 2.0, 3.0], [0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]
ROWS = """
    from ts.torch_handler.base_handler import BaseHandler

    class Rows(BaseHandler):
        def preprocess(self, data):
            return super().preprocess([row["body"] for row in data]).float()

        def postprocess(self, data):
            assert data.dtype.itemsize == 4
            weights = next(self.model.parameters())
            return [{"numbers": row, "weights": str(weights.dtype), "precision": self.precision} for row in data.tolist()]
"""


@pytest.mark.parametrize(
    ("file", "precision"), [("weights.pth", "bf16"), ("weights.pth", "FP16"), ("script.pt", "bf16")]
)
def test_the_setting_converts_weights_and_nearly_keeps_the_answers(
    start_worker: StartWorker, net: Net, model_bytes: dict[str, bytes], file: str, precision: str
) -> None:
    model = {"serializedFile": file, **({"modelFile": "model.py"} if file.endswith(".pth") else {})}
    files = {file: model_bytes[file], "model.py": MODEL.encode()}
    worker = start_worker(ROWS, files=files, model=model, model_config={"precision": precision})
    answers = worker.values(*map(a_request, QUESTIONS))
    dtype = {"bf16": "torch.bfloat16", "FP16": "torch.float16"}[precision]
    assert {(answer["weights"], answer["precision"]) for answer in answers} == {
        (dtype, precision.lower())
    }
    with torch.inference_mode():
        expected = net(torch.tensor(QUESTIONS))
    torch.testing.assert_close(
        torch.tensor([answer["numbers"] for answer in answers]), expected, rtol=0.03, atol=0.03
    )


@pytest.mark.parametrize(
    ("attributes", "without_effect"),
    [({}, ["precision", "forms"]), ({"precision": "bf16"}, ["forms"]), ({"form": "bf16"}, [])],
)
def test_settings_that_a_handler_does_not_apply_cause_a_warning(
    load_here: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    attributes: dict[str, Any],
    without_effect: list[str],
) -> None:
    entry = LoadedHandler(lambda *_: [], "own.py", type("Own", (), attributes)())
    config = json.dumps({"precision": "bf16", "forms": ["bf16"]})
    load_here(lambda *_: entry, model_config=config)
    warned_keys = [
        line.split()[0] for line in caplog.messages if "own.py does not apply it" in line
    ]
    assert warned_keys == without_effect


@pytest.mark.parametrize("value", ["int8", 16, True])
def test_the_error_for_an_unknown_precision_lists_the_known_ones(value: Any) -> None:
    with pytest.raises(LoadError, match="it must be fp32, fp16, bf16"):
        configured_precision({"precision": value})


def test_only_floating_point_tensors_are_cast_also_if_nested() -> None:
    integers, floats = torch.tensor([1]), torch.tensor([1.5])
    value = [{"a": (integers, floats)}, "text", 3]
    result = cast(value, torch.bfloat16)
    assert (result[0]["a"][0].dtype, result[0]["a"][1].dtype, result[1:]) == (
        torch.int64,
        torch.bfloat16,
        ["text", 3],
    )


def test_a_converted_module_is_a_module_and_accepts_keyword_arguments(net: Net) -> None:
    model = Net()
    model.load_state_dict(net.state_dict())
    converted_model = in_precision(model.eval(), "bf16", CPU)
    assert converted_model is model
    with torch.inference_mode():
        assert model(x=torch.tensor(QUESTIONS)).dtype == torch.float32
        torch.testing.assert_close(model(x=torch.tensor(QUESTIONS)), model(torch.tensor(QUESTIONS)))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("frozen.pt", "frozen TorchScript"),
        ("program.pt2", "it was exported in float32"),
        ("model.onnx", "float32"),
    ],
)
def test_the_error_for_an_inconvertible_model_gives_reason_and_advice(
    model_bytes: dict[str, bytes], onnx_bytes: bytes, tmp_path: Path, file: str, message: str
) -> None:
    (tmp_path / file).write_bytes(onnx_bytes if file == "model.onnx" else model_bytes[file])
    load = {"frozen.pt": load_torchscript, "program.pt2": load_exported, "model.onnx": load_onnx}[
        file
    ]
    model = load(tmp_path / file, CPU)
    with pytest.raises(
        LoadError,
        match=rf"precision: bf16 cannot be given to this model: .*{message}.*remove the key",
    ):
        in_precision(model, "bf16", CPU)
    fp32_model = in_precision(load(tmp_path / file, CPU), "fp32", CPU)
    with torch.inference_mode():
        torch.testing.assert_close(
            fp32_model(torch.tensor(QUESTIONS[:2])), model(torch.tensor(QUESTIONS[:2]))
        )


def test_a_program_that_was_exported_in_that_precision_takes_float32() -> None:
    layer = torch.nn.Linear(3, 2).bfloat16()
    program = torch.export.export(layer, (torch.zeros(2, 3, dtype=torch.bfloat16),))
    model = in_precision(FixedBatch(program.module(), 2), "bf16", CPU)
    with torch.inference_mode():
        result = model(torch.tensor(QUESTIONS))
        assert (result.dtype, result.shape, model.size) == (torch.float32, (3, 2), 2)
        torch.testing.assert_close(
            result, layer(torch.tensor(QUESTIONS).bfloat16()).float(), rtol=0.02, atol=0.02
        )


def test_a_model_of_unknown_precision_is_refused() -> None:
    with pytest.raises(
        LoadError,
        match=r"cannot be given to a builtin_function_or_method.*remove the key",
    ):
        in_precision(len, "fp32", CPU)


def test_a_precision_that_torch_lacks_on_the_device_is_an_error_when_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking(*_: Any) -> None:
        raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'\nand more")

    monkeypatch.setattr(torch.nn.functional, "conv2d", lacking)
    with pytest.raises(
        LoadError,
        match=r"fp16 is not available on cpu .* for 'Half'$",
    ):
        in_precision(torch.nn.Linear(1, 1), "fp16", CPU)
