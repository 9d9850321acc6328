"""Forms of TensorRT, with a fake of torch-tensorrt's documented interface and on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forms import built, compared, loaded, tensor_inputs
from tests.support.recorders import documented
from tsx_runtime.worker.forms.kinds import known_forms, tensorrt


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(rows)) * scale


def two_inputs(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tensor_inputs(4)(rows)[0], {"scale": torch.full((rows, 1), 2.0)}


@pytest.fixture
def torch_tensorrt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(
        tensorrt, "load_aotinductor", lambda path, *_: torch.export.load(path).module()
    )
    yield from documented("torch_tensorrt", monkeypatch)


def test_engines_run_a_range_of_sizes_and_the_archives_model_larger_ones(
    torch_tensorrt: Any, tmp_path: Path
) -> None:
    form = known_forms()["tensorrt"]
    comparison = compared(
        form, lambda: TwoInputs().eval(), two_inputs, tmp_path, sizes=(1, 3, 17, 40)
    )
    assert comparison.worst < 1e-5
    (call,) = torch_tensorrt.dynamo.CALLS
    assert call["shapes"] == [
        {"min_shape": (1, 4), "opt_shape": (8, 4), "max_shape": (32, 4)},
        {"min_shape": (1, 1), "opt_shape": (8, 1), "max_shape": (32, 1)},
    ]
    assert call["weights"] == {"float32"}
    assert loaded(form, TwoInputs, tmp_path).passed_over == ()


def test_fp16_converts_the_weights_but_no_inputs_or_outputs(
    torch_tensorrt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch_tensorrt,
        "save",
        lambda module, *_, arg_inputs, **__: results.append(module(*arg_inputs)),
    )
    results: list[tuple[torch.Tensor]] = []
    built(known_forms()["tensorrt-fp16"], TwoInputs().eval(), two_inputs, tmp_path)
    assert torch_tensorrt.dynamo.CALLS[0]["weights"] == {"float16"}
    assert results[0][0].dtype == torch.float32


def test_the_error_names_the_missing_package() -> None:
    form = known_forms()["tensorrt"]
    if importlib.util.find_spec("torch_tensorrt") is None:
        assert "pip install 'tsx-serve[tensorrt]'" in str(form.missing())
    assert form.extras == ["tensorrt"]
    assert form.devices == {"cuda"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "worst"), [("tensorrt", 1e-2), ("tensorrt-fp16", 3e-2)])
def test_it_gives_the_models_results(name: str, worst: float, tmp_path: Path) -> None:
    pytest.importorskip("torch_tensorrt")

    def inputs(rows: int) -> Any:
        (batch,), kwargs = two_inputs(rows)
        return (batch.cuda(),), {name: tensor.cuda() for name, tensor in kwargs.items()}

    device = torch.device("cuda", 0)
    assert (
        compared(
            known_forms()[name],
            lambda: TwoInputs().eval().to(device),
            inputs,
            tmp_path,
            device=device,
        ).worst
        < worst
    )
