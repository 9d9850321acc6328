"""Forms with 8-bit and 4-bit layers.

Their results are close to the model's for every batch size, and workers load them without torchao.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.forms import compared, subject_of, tensor_inputs
from tsx_runtime.worker.forms.form import NotBuilt
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.kinds.integers import StaticInt8Form, check_linear_layers
from tsx_runtime.worker.forms.machine_code import MachineCodeForm

pytest.importorskip("torchao")

IMAGES, TOKENS = tensor_inputs(1, 16, 16), tensor_inputs(8, 64)


def images_model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2),
        nn.ReLU(),
    )
    return nn.Sequential(
        convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)
    ).eval()


def tokens_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.GELU(),
        nn.Linear(128, 64),
        nn.LayerNorm(64),
        nn.Flatten(),
        nn.Linear(512, 5),
    ).eval()


@pytest.mark.usefixtures("processes")
def test_static_int8_nearly_equals_a_model_of_one_channel_for_every_batch_size(
    tmp_path: Path,
) -> None:
    # Some inputs lie outside the calibrated range.
    assert 0 < compared(known_forms()["int8-static"], images_model, IMAGES, tmp_path).worst < 0.2


def test_static_int8_with_bf16_returns_the_models_dtypes() -> None:
    form = known_forms()["int8-static-bf16"]
    assert isinstance(form, StaticInt8Form)
    model = tokens_model()
    graph = form.program(subject_of(model, TOKENS)).module()
    for rows in (1, 5, 17):
        (tokens,), _ = TOKENS(rows)
        torch.testing.assert_close(graph(tokens)[0], model(tokens), atol=0.05, rtol=0.05)


def test_int4_weights_give_nearly_the_models_results() -> None:
    """Run the program before it is compiled."""
    form = known_forms()["int4-weights"]
    assert isinstance(form, MachineCodeForm)
    model = tokens_model()
    graph = form.program(subject_of(tokens_model(), TOKENS)).module()
    for rows in (1, 5, 17):
        (tokens,), _ = TOKENS(rows)
        answer, expected = graph(tokens)[0], model(tokens)
        assert 0 < float((answer - expected).abs().max() / expected.abs().max()) < 0.25


@pytest.mark.usefixtures("processes")
def test_an_outlier_does_not_change_another_row_in_dynamic_int8(tmp_path: Path) -> None:
    comparison = compared(known_forms()["int8-dynamic"], tokens_model, TOKENS, tmp_path)
    assert 0 < comparison.worst < 0.03
    rows = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        row_result, batch_result = (
            comparison.loaded.model(rows[:1]),
            comparison.loaded.model(torch.stack([rows[0], rows[1] * 1000])),
        )
    torch.testing.assert_close(batch_result[:1], row_result)
    assert_served_without_torchao("int8-dynamic", tmp_path)


def assert_served_without_torchao(name: str, directory: Path) -> None:
    code = "import sys; from pathlib import Path; from torch import device, randn; from tsx_runtime.worker.forms.loading import load_form\n"
    code += f"form = load_form([{name!r}], Path({str(directory)!r}), {{}}, lambda: None, device('cpu'))\n"
    code += "print(form.name, form.model(randn(5, 8, 64)).shape[0], 'torchao' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.stdout.split() == [name, "5", "False"], process.stderr


@pytest.mark.usefixtures("processes")
def test_forms_of_linear_layers_do_not_apply_to_convolutional_models() -> None:
    subject = subject_of(images_model(), IMAGES)
    for name in ("int8-dynamic", "int4-weights"):
        assert "only 0%" in str(known_forms()[name].applies(subject))
    assert check_linear_layers(subject_of(nn.ReLU(), IMAGES)) == "the model has no linear layer"


def test_quantized_forms_name_the_layers_that_they_need(tmp_path: Path) -> None:
    with pytest.raises(NotBuilt, match="no convolution or linear layer"):
        known_forms()["int8-static"].build(subject_of(nn.Softmax(dim=1), IMAGES), tmp_path)
    odd_layer = subject_of(nn.Linear(30, 7), tensor_inputs(30))
    with pytest.raises(NotBuilt, match="multiple of 32 inputs and of 16 outputs"):
        known_forms()["int4-weights"].build(odd_layer, tmp_path)
