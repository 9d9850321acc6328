from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.worker.forms.kinds.subjects import images, texts, tied
from tests.support.forms import Inputs, built, compared, loaded, subject_of, tensor_inputs
from tsx_runtime.worker.forms.form import NotBuilt
from tsx_runtime.worker.forms.kinds import known_forms


@pytest.mark.parametrize(("name", "worst"), [("torchscript", 1e-5), ("torchscript-bf16", 0.02)])
@pytest.mark.parametrize(
    ("make", "inputs"), [(images, tensor_inputs(3, 9, 9)), (tied, texts)], ids=["images", "texts"]
)
def test_it_answers_as_the_model_does(
    name: str, worst: float, make: Any, inputs: Inputs, tmp_path: Path
) -> None:
    assert compared(known_forms()[name], make, inputs, tmp_path).worst < worst


def test_a_scripted_model_is_taken_as_it_is(tmp_path: Path) -> None:
    assert (
        compared(
            known_forms()["torchscript"],
            lambda: torch.jit.script(images()),
            tensor_inputs(3, 9, 9),
            tmp_path,
        ).worst
        < 1e-5
    )


def test_a_trace_that_holds_a_size_is_a_reason(tmp_path: Path) -> None:
    class Baked(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.view(int(rows.shape[0]), 2, 2)

    with pytest.raises(
        NotBuilt, match="its trace for one call does not answer another one, of 2 rows"
    ):
        built(known_forms()["torchscript"], Baked(), tensor_inputs(4), tmp_path)


def test_a_damaged_file_leaves_the_archives_own_model(tmp_path: Path) -> None:
    form = known_forms()["torchscript"]
    built(form, images(), tensor_inputs(3, 9, 9), tmp_path)
    (tmp_path / "tsx-forms" / "torchscript" / "model.pt").write_bytes(b"PK no archive")
    found = loaded(form, images, tmp_path)
    assert found.name == "reference"
    assert found.passed_over[0].startswith(
        "torchscript: it cannot be loaded: model.pt cannot be loaded as TorchScript"
    )


def test_a_function_does_not_apply() -> None:
    subject = subject_of(lambda rows: rows, tensor_inputs(4))
    assert (known_forms()["torchscript"].applies(subject) or "").startswith(
        "the model is a function"
    )
