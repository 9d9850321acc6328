"""Forms in half precision, with converted weights or autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.worker.forms.kinds.subjects import IMAGES, images, texts, tied
from tests.support.forms import built, loaded, subject_of, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.kinds.precision import FILE
from tsx_runtime.worker.handlers.steps.explaining import input_attributions


def test_converted_weights_are_mapped_from_the_forms_file(tmp_path: Path) -> None:
    form = known_forms()["bf16"]
    built(form, tied(), texts, tmp_path)
    model = loaded(form, tied, tmp_path).model
    path = str(tmp_path / "tsx-forms" / "bf16" / FILE)
    mapped_ranges = [
        range(*(int(end, 16) for end in region.addr.split("-")))
        for region in psutil.Process().memory_maps(grouped=False)
        if region.path == path
    ]
    assert any(model.embed.weight.data_ptr() in pages for pages in mapped_ranges)
    assert model.out.weight.data_ptr() == model.embed.weight.data_ptr()
    assert (tmp_path / "tsx-forms" / "bf16" / FILE).stat().st_size < 1.1 * 2 * 64 * 96 + 1000


def test_weights_of_another_shape_leave_the_archives_model_unchanged(tmp_path: Path) -> None:
    form = known_forms()["bf16"]
    built(form, nn.Linear(4, 3).eval(), tensor_inputs(4), tmp_path)
    loaded_form = loaded(form, lambda: nn.Linear(4, 2).eval(), tmp_path)
    assert loaded_form.name == "reference"
    assert "weight is (3, 4) in weights.safetensors, and (2, 4)" in loaded_form.passed_over[0]
    assert loaded_form.model.weight.dtype == torch.float32


def test_autocast_casts_each_weight_once(tmp_path: Path) -> None:
    form = known_forms()["bf16-autocast"]
    built(form, images(), IMAGES, tmp_path)
    model = loaded(form, images, tmp_path).model
    with torch.inference_mode():
        images_of_inference_mode = torch.randn(2, 3, 9, 9)
        model(images_of_inference_mode)
        with Casts() as casts:
            model(images_of_inference_mode)
    assert (4, 392) not in casts.shapes
    assert (2, 3, 9, 9) in casts.shapes


def test_explanations_of_an_autocast_form_use_the_archives_model(tmp_path: Path) -> None:
    pytest.importorskip("captum")
    form, rows = known_forms()["bf16-autocast"], torch.randn(1, 3, 9, 9)
    built(form, images(), IMAGES, tmp_path)
    torch.testing.assert_close(
        input_attributions(loaded(form, images, tmp_path).model, rows, 1),
        input_attributions(images(), rows, 1),
    )


class Casts(TorchDispatchMode):
    """A mode that records the shapes of tensors that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function._schema.name in ("aten::to", "aten::_to_copy"):
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **kwargs or {})


def test_an_exported_program_runs_under_autocast() -> None:
    model = torch.export.export(
        images(), (torch.randn(2, 3, 9, 9),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    ).module()
    assert known_forms()["bf16-autocast"].applies(subject_of(model, IMAGES)) is None
