from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.support.forms import compared, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def test_it_answers_as_the_model_does(tmp_path: Path) -> None:
    assert compared(known_forms()["onnx"], small, tensor_inputs(3, 9, 9), tmp_path).worst < 1e-5
