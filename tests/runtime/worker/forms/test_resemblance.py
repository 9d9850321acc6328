"""The comparison of a form's results with its model's.

A form whose results differ too much is rejected.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.forms import CPU, subject_of, tensor_inputs
from tsx_runtime.worker.forms.form import FormSource, NotBuilt
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.resemblance import ModelResults, explained_variance

ROWS = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def test_results_are_compared_by_explained_variance() -> None:
    assert explained_variance([[ROWS]], [[ROWS]]) == 1
    assert explained_variance([[ROWS]], [[ROWS + 0.01]]) > 0.99
    assert explained_variance([[ROWS]], [[ROWS.mean(0).expand(8, 5)]]) == pytest.approx(0)
    assert explained_variance([[ROWS]], [[ROWS.flip(0)]]) < 0
    assert explained_variance([[ROWS]], [[torch.full((8, 5), math.nan)]]) <= 0
    assert explained_variance([[ROWS[:2]], [ROWS[2:, :3]]], [[ROWS[:2]], [ROWS[2:, :3]]]) == 1


def test_almost_equal_rows_are_compared_by_magnitude() -> None:
    similar_rows = 1000 + 0.01 * ROWS
    assert explained_variance([[similar_rows]], [[similar_rows + 5]]) > 0.99
    assert explained_variance([[similar_rows]], [[-similar_rows]]) < 0


def test_integer_and_infinite_results_are_not_compared() -> None:
    masked_rows = ROWS.masked_fill(ROWS > 1, -math.inf)
    assert (
        explained_variance([[masked_rows, ROWS > 0]], [[masked_rows.clamp(min=-1e4), ROWS < 0]])
        == 1
    )


def test_a_form_with_the_results_of_another_model_is_rejected(tmp_path: Path) -> None:
    form, subject = known_forms()["torchscript"], subject_of(model(1), tensor_inputs(6))
    source = FormSource(
        tmp_path, form.build(subject, tmp_path), subject.signature, lambda: None, lambda: None, CPU
    )
    with torch.no_grad():
        ModelResults.of(subject).check(form, source)
        with pytest.raises(NotBuilt, match="they explain 0% of the variance"):
            ModelResults.of(subject_of(model(2), tensor_inputs(6))).check(form, source)
