"""TorchScript forms, with hard-coded batch sizes and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.runtime.worker.forms.kinds.subjects import IMAGES, images
from tests.support.forms import built, loaded, tensor_inputs
from tsx_runtime.worker.forms.form import NotBuilt
from tsx_runtime.worker.forms.kinds import known_forms


def test_a_trace_with_a_hard_coded_batch_size_is_rejected(tmp_path: Path) -> None:
    class HardCodedBatch(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.view(int(rows.shape[0]), 2, 2)

    with pytest.raises(NotBuilt, match="another one, of 2 rows"):
        built(known_forms()["torchscript"], HardCodedBatch(), tensor_inputs(4), tmp_path)


def test_a_damaged_file_falls_back_to_the_archives_model(tmp_path: Path) -> None:
    form = known_forms()["torchscript"]
    built(form, images(), IMAGES, tmp_path)
    (tmp_path / "tsx-forms" / "torchscript" / "model.pt").write_bytes(b"PK no archive")
    loaded_form = loaded(form, images, tmp_path)
    assert loaded_form.name == "reference"
    assert "model.pt cannot be loaded as TorchScript" in loaded_form.passed_over[0]
