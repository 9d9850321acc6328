"""Results of forms, which must equal those of the model for every batch size."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.worker.forms.kinds.subjects import (
    IMAGES,
    encoder,
    images,
    scripted,
    sentences,
    texts,
    tied,
)
from tests.support.forms import Inputs, built, compared, loaded, subject_of, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms

EXACT = 1e-5
# The last field is the allowed error, relative to the model's largest number.
FORMS: list[tuple[str, Any, Inputs, float]] = [
    ("channels-last", images, IMAGES, EXACT),
    ("torchscript", images, IMAGES, EXACT),
    ("torchscript", scripted, IMAGES, EXACT),
    ("torchscript", tied, texts, EXACT),
    *[
        (name, make, inputs, 0.02)
        for name in ("torchscript-bf16", "bf16", "bf16-autocast", "fp16", "fp16-autocast")
        for make, inputs in ((images, IMAGES), (tied, texts))
    ],
    ("onnx", scripted, IMAGES, EXACT),
    ("onnx", encoder, sentences, EXACT),
    ("onnx-int8", scripted, IMAGES, 0.3),
    ("openvino", encoder, sentences, EXACT),
    ("openvino-bf16", scripted, IMAGES, 0.05),
    ("openvino-int8", scripted, IMAGES, 0.2),
]


def require_packages(name: str) -> None:
    """Skip the test if a form's packages are missing.

    Unlike importorskip, this does not import openvino with its telemetry.
    """
    packages = {"onnx": ["onnxscript"], "openvino": ["openvino", "nncf"]}
    if not all(map(find_spec, packages.get(name.partition("-")[0], []))):
        pytest.skip(f"needs the packages of {name}")


@pytest.mark.parametrize(("name", "make", "inputs", "max_error"), FORMS)
def test_a_form_gives_the_results_of_the_model(
    name: str,
    make: Any,
    inputs: Inputs,
    max_error: float,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    require_packages(name)
    if reason := known_forms()[name].applies(subject_of(make(), inputs)):
        pytest.skip(reason)
    comparison = compared(known_forms()[name], make, inputs, tmp_path)
    assert comparison.worst < max_error
    assert max_error == EXACT or comparison.worst > 0
    args, kwargs = inputs(2)
    for tensor in torch.utils._pytree.tree_leaves(comparison.loaded.model(*args, **kwargs)):
        assert tensor.dtype == torch.float32
    assert "Statistics" not in capfd.readouterr().out
    assert "openvino_telemetry.main" not in sys.modules


@pytest.mark.parametrize("name", [name for name in known_forms() if name.startswith("onnx")])
def test_an_outlier_in_the_batch_does_not_change_a_rows_result(name: str, tmp_path: Path) -> None:
    require_packages(name)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    built(known_forms()[name], model, tensor_inputs(8), tmp_path)
    form = loaded(known_forms()[name], lambda: model, tmp_path).model
    row = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(form(torch.cat([row, 1e4 * row]))[:1], form(row))


def test_openvino_results_are_not_overwritten_by_later_or_parallel_batches(
    tmp_path: Path,
) -> None:
    require_packages("openvino")
    model = compared(known_forms()["openvino"], scripted, IMAGES, tmp_path, sizes=(2,)).loaded.model
    with ThreadPoolExecutor(4) as pool, torch.inference_mode():
        batches = [torch.randn(4, 3, 9, 9) for _ in range(40)]
        answers = list(pool.map(model, batches))
        for batch, answer in zip(batches, answers, strict=True):
            torch.testing.assert_close(answer, images()(batch))


@pytest.mark.parametrize("name", ["channels-last", "bf16"])
def test_weights_of_convolutions_are_channels_last(name: str, tmp_path: Path) -> None:
    form = known_forms()[name]
    built(form, images(), IMAGES, tmp_path)
    weight = loaded(form, images, tmp_path).model[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "model", "reason"),
    [
        ("channels-last", nn.Linear(4, 2), "the model has no 2D convolution"),
        ("torchscript", lambda rows: rows, "the model is a function"),
        ("aotinductor", torch.jit.script(nn.Linear(4, 2)), "the model is TorchScript"),
        ("tensorrt", torch.jit.script(nn.Linear(4, 2)), "the model is TorchScript"),
    ],
)
def test_a_form_gives_the_reason_why_it_does_not_apply(name: str, model: Any, reason: str) -> None:
    assert reason in str(known_forms()[name].applies(subject_of(model, tensor_inputs(4))))
