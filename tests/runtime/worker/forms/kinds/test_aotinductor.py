"""Forms of AOTInductor, whose machine code is compiled when the form is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.worker.forms.kinds.subjects import IMAGES, images, texts, tied
from tests.support.forms import compared, subject_of
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.kinds.aotinductor import AotInductorForm


def scaled() -> nn.Module:
    return Scaled().eval()


class Scaled(nn.Module):
    """A model that takes images and a keyword, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.model = images()

    def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.model(rows) * scale}


def scaled_images(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return IMAGES(rows)[0], {"scale": torch.full((rows, 1), 2.0)}


@pytest.mark.usefixtures("processes")
def test_it_gives_the_models_results_for_any_memory_format(tmp_path: Path) -> None:
    comparison = compared(known_forms()["aotinductor"], scaled, scaled_images, tmp_path)
    assert comparison.worst < 1e-5
    images, scale = torch.randn(4, 3, 9, 9).to(memory_format=torch.channels_last), torch.ones(4, 1)
    torch.testing.assert_close(
        comparison.loaded.model(images, scale=scale),
        scaled()(images, scale=scale),
        rtol=1e-4,
        atol=1e-4,
    )
    # The model itself raises the same error.
    with pytest.raises(RuntimeError, match="size of tensor"):
        comparison.loaded.model(images, scale=torch.ones(3, 1))


def test_the_bf16_form_takes_several_tensors_and_returns_float32() -> None:
    form = known_forms()["aotinductor-bf16"]
    assert isinstance(form, AotInductorForm)
    program = form.program(subject_of(tied(), texts))
    assert {weights.dtype for name, weights in program.state_dict.items() if "weight" in name} == {
        torch.bfloat16
    }
    for rows in (1, 5, 17):
        (ids,), kwargs = texts(rows)
        (logits,) = program.module()(ids, kwargs["mask"])
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, tied()(ids, **kwargs)["logits"], atol=0.3, rtol=0.02)
