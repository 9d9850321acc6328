from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.support.forms import compared, subject_of, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def test_it_answers_as_the_model_does(tmp_path: Path) -> None:
    found = compared(known_forms()["channels-last"], small, tensor_inputs(3, 9, 9), tmp_path)
    assert found.worst < 1e-5
    assert next(found.loaded.model.parameters()).is_contiguous(memory_format=torch.channels_last)


def test_it_does_not_apply_to_a_model_without_convolutions() -> None:
    subject = subject_of(nn.Linear(3, 2), tensor_inputs(3))
    assert known_forms()["channels-last"].applies(subject) == "the model has no 2D convolution"
