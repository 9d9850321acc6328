"""Pruned forms, which have smaller hidden layers and unchanged inputs, outputs and heads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.forms import subject_of, tensor_inputs
from tsx_runtime.worker.forms.form import NotBuilt
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.kinds.pruning import PrunedForm, _prune

pytest.importorskip("torch_pruning")

IMAGES, TOKENS = tensor_inputs(3, 16, 16), tensor_inputs(8, 32)


class Residual(nn.Module):
    """A block with inner channels, half of which have no effect."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = (
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.Conv2d(32, 3, 3, padding=1),
        )
        self.head = nn.Linear(3, 5)
        for weights in (
            self.first.weight[16:],
            self.first.bias[16:],
            self.norm.weight[16:],
            self.second.weight[:, 16:],
        ):
            weights.data.zero_()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images + self.second(functional.relu(self.norm(self.first(images))))
        return self.head(images.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)
        self.inner, self.outer, self.answer = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows, length, width = tokens.shape
        query, key, value = (
            self.heads(tokens).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        )
        attention = (
            functional.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(rows, length, width)
        )
        tokens = self.norm(tokens + self.out(attention))
        return self.answer((tokens + self.outer(functional.gelu(self.inner(tokens))))[:, 0])


@pytest.mark.usefixtures("processes")
def test_removing_channels_without_effect_keeps_the_results() -> None:
    form, model = known_forms()["pruned-50"], Residual().eval()
    assert isinstance(form, PrunedForm)
    assert form.applies(subject_of(model, IMAGES)) is None
    program = form.program(subject_of(model, IMAGES))
    assert {
        name: tuple(weights.shape)
        for name, weights in program.state_dict.items()
        if name.endswith("second.weight")
    } == {"model.second.weight": (3, 16, 3, 3)}
    for rows in (1, 5, 17):
        (images,), _ = IMAGES(rows)
        torch.testing.assert_close(program.module()(images)[0], model(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("share", "hidden"), [(0.25, 48), (0.5, 32)])
def test_only_the_hidden_units_of_an_attention_block_are_pruned(share: float, hidden: int) -> None:
    model = Attention().eval()
    pruned = copy.deepcopy(model)
    assert _prune(pruned, subject_of(model, TOKENS), share) == 1
    sizes = {
        name: (layer.in_features, layer.out_features)
        for name, layer in pruned.named_modules()
        if isinstance(layer, nn.Linear)
    }
    assert sizes == {
        "heads": (32, 96),
        "out": (32, 32),
        "inner": (32, hidden),
        "outer": (hidden, 32),
        "answer": (32, 2),
    }
    assert pruned(torch.randn(3, 8, 32)).shape == (3, 2)


def test_a_model_without_prunable_layers_is_not_built(tmp_path: Path) -> None:
    form = known_forms()["pruned-25"]
    reason = form.applies(subject_of(nn.Linear(16, 16), tensor_inputs(16)))
    assert "no two convolutions or linear layers" in str(reason)
    narrow = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 16)).eval()
    with pytest.raises(NotBuilt, match="only the next layers use"):
        form.build(subject_of(narrow, tensor_inputs(16)), tmp_path)
