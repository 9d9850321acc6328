"""Forms with 8-bit and 4-bit layers: they answer nearly as the model does, for every batch size, and workers load them without torchao."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.forms import CPU, compared, loaded, subject_of, tensor_inputs
from tsx_runtime.worker.forms.form import NotBuilt
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.kinds.int8_dynamic import no_linear

pytest.importorskip("torchao")

IMAGES, TOKENS = tensor_inputs(3, 16, 16), tensor_inputs(8, 64)


def images_model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU())
    return nn.Sequential(convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)).eval()


def tokens_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Flatten(), nn.Linear(512, 5)).eval()


@pytest.mark.parametrize("name", ["int8-static", "int8-static-bf16"])
def test_convolutions_in_static_int8_answer_nearly_as_the_model_for_every_batch_size(name: str, tmp_path: Path) -> None:
    assert compared(known_forms()[name], images_model, IMAGES, tmp_path).worst < 0.06


@pytest.mark.parametrize(("name", "bound"), [("int8-dynamic", 0.03), ("int4-weights", 0.25)])
def test_linear_layers_of_few_bits_answer_nearly_as_the_model_for_every_batch_size(name: str, bound: float, tmp_path: Path) -> None:
    form = known_forms()[name]
    found = compared(form, tokens_model, TOKENS, tmp_path)
    assert 0 < found.worst < bound
    assert loaded(form, tokens_model, tmp_path).name == name
    code = "import sys; from pathlib import Path; from torch import device, randn; from tsx_runtime.worker.forms.loading import load_form\n"
    code += f"found = load_form([{name!r}], Path({str(tmp_path)!r}), {{}}, None, device('cpu'))\n"
    code += "print(found.name, found.model(randn(5, 8, 64)).shape[0], 'torchao' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [name, "5", "False"]


def test_a_row_in_dynamic_int8_keeps_its_answer_beside_an_outlier(tmp_path: Path) -> None:
    found = compared(known_forms()["int8-dynamic"], tokens_model, TOKENS, tmp_path, sizes=(3,)).loaded.model
    rows = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        alone, beside = found(rows[:1]), found(torch.stack([rows[0], rows[1] * 1000]))
    torch.testing.assert_close(beside[:1], alone)


def test_forms_of_linear_layers_do_not_apply_where_the_arithmetic_is_in_convolutions() -> None:
    subject = subject_of(images_model(), IMAGES)
    for name in ("int8-dynamic", "int4-weights"):
        assert known_forms()[name].applies(subject) == "only 0% of its arithmetic is in linear layers, which this form is for"
    assert no_linear(subject_of(nn.ReLU(), IMAGES)) == "the model has no linear layer"


def test_quantized_forms_say_which_layers_they_miss(tmp_path: Path) -> None:
    with pytest.raises(NotBuilt, match="no convolution or linear layer"):
        known_forms()["int8-static"].build(subject_of(nn.Softmax(dim=1), IMAGES), tmp_path)
    odd = subject_of(nn.Linear(30, 7), tensor_inputs(30))
    with pytest.raises(NotBuilt, match="multiple of 32 inputs and of 16 outputs"):
        known_forms()["int4-weights"].build(odd, tmp_path)
    assert odd.device == CPU
