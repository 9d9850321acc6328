from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forms import Inputs, built, compared, loaded, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms

pytest.importorskip("onnxscript")

IMAGES = tensor_inputs(3, 9, 9)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    ).eval()


def scripted() -> Any:
    return torch.jit.script(small())


class Encoder(nn.Module):
    """A layer of a transformer. It gets a tensor that it does not use, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.queries, self.keys, self.values = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(
        self, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        heads = (layer(x).unsqueeze(1) for layer in (self.queries, self.keys, self.values))
        mixed = nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask[:, None, None, :].bool()
        )
        hidden = self.norm(x + mixed.squeeze(1))
        return {"logits": self.head(hidden[:, 0]), "hidden": hidden}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval()


def texts(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The length is free too."""
    ids = torch.randint(0, 50, (rows, 5 + rows % 4), generator=torch.Generator().manual_seed(rows))
    return (ids, torch.zeros_like(ids)), {"mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("name", "make", "inputs", "bound"),
    [
        ("onnx", scripted, IMAGES, 1e-5),
        ("onnx", encoder, texts, 1e-5),
        ("onnx-int8", scripted, IMAGES, 0.2),
    ],
)
def test_it_answers_as_the_model_does(
    name: str, make: Any, inputs: Inputs, bound: float, tmp_path: Path
) -> None:
    assert compared(known_forms()[name], make, inputs, tmp_path).worst < bound


@pytest.mark.parametrize("name", [name for name in known_forms() if name.startswith("onnx")])
def test_a_row_keeps_its_answer_beside_an_outlier(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    built(known_forms()[name], model, tensor_inputs(8), tmp_path)
    form = loaded(known_forms()[name], lambda: model, tmp_path).model
    row = torch.randn(1, 8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(form(torch.cat([row, 1e4 * row]))[:1], form(row))
