"""Exports of models by torch.export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.forms import subject_of, tensor_inputs
from tsx_runtime.worker.forms.exporting import SizeRange, check_exportable, export_flat, size_ranges
from tsx_runtime.worker.forms.form import NotBuilt
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.signature import MAX_EXPORTED_BATCH
from tsx_runtime.worker.handlers.models.model_files import FixedBatch, load_exported

IMAGES = tensor_inputs(1, 8, 8)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.embed(ids) * mask.unsqueeze(-1) * scale
        return {"logits": self.head(hidden.mean(1)), "hidden": [hidden]}


def texts(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    length = 5 + rows % 4
    return (torch.randint(0, 50, (rows, length)),), {"mask": torch.ones(rows, length), "scale": 2.0}


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()


def export_and_load(model: nn.Module, path: Path, **options: Any) -> Any:
    torch.export.save(torch.export.export(model, (torch.randn(2, 1, 8, 8),), **options), path)
    return load_exported(path, torch.device("cpu"))


def test_tensors_keywords_and_lengths_become_flat_tensors_of_free_sizes() -> None:
    model = Pair().eval()
    program = export_flat(subject_of(model, texts)).module()
    for rows in (1, 7):
        args, kwargs = texts(rows)
        logits, hidden = program(args[0], kwargs["mask"])
        expected = model(*args, **kwargs)
        torch.testing.assert_close((logits, hidden), (expected["logits"], expected["hidden"][0]))


class Positions(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 12, 8))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = (self.embed(ids) + self.places[:, : ids.shape[1]]) * mask.unsqueeze(-1) * scale
        return {"logits": self.head(hidden.mean(1)), "hidden": [hidden]}


def test_the_sizes_that_compiled_code_accepts_are_known_ranges() -> None:
    subject = subject_of(Positions().eval(), texts)
    assert subject.signature is not None
    rows, length = size_ranges(export_flat(subject), subject.signature)
    assert rows == SizeRange(((0, 0), (1, 0)), 1, MAX_EXPORTED_BATCH)
    assert length == SizeRange(((0, 1), (1, 1)), 1, 12)
    assert length.holds([torch.ones(2, 12), torch.ones(2, 12)])
    for ids, mask in ((13, 13), (12, 11), (0, 0)):
        assert not length.holds([torch.ones(2, ids), torch.ones(2, mask)])


def test_an_exported_program_is_exported_again(tmp_path: Path) -> None:
    model = export_and_load(
        convolutions(), tmp_path / "model.pt2", dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    (answer,) = export_flat(subject_of(model, IMAGES)).module()(*IMAGES(5)[0])
    torch.testing.assert_close(answer, convolutions()(*IMAGES(5)[0]))


def test_a_program_exported_for_one_batch_size_accepts_others_if_possible(
    tmp_path: Path,
) -> None:
    model = export_and_load(convolutions(), tmp_path / "model.pt2")
    assert isinstance(model, FixedBatch)
    (answer,) = export_flat(subject_of(model, IMAGES)).module()(*IMAGES(5)[0])
    torch.testing.assert_close(answer, convolutions()(*IMAGES(5)[0]))


def test_a_model_that_fixes_the_batch_size_is_not_built() -> None:
    class OfThree(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows + rows.sum() if rows.shape[0] == 3 else rows

    with pytest.raises(NotBuilt, match=r"takes only batches of \d"):
        export_flat(subject_of(OfThree(), tensor_inputs(4), sizes=(2, 3)))


def test_a_model_that_torch_cannot_export_is_not_built() -> None:
    script = torch.jit.trace(convolutions(), torch.randn(2, 1, 8, 8))
    for model, kind in ((script, "TorchScript"), (lambda rows: rows, "a function")):
        assert f"the model is {kind}," in str(check_exportable(subject_of(model, IMAGES)))


def test_forms_that_change_layers_need_the_eager_model(tmp_path: Path) -> None:
    free = ({0: torch.export.Dim("rows")},)
    for kind, model in (
        ("an exported program", export_and_load(convolutions(), tmp_path / "fixed.pt2")),
        (
            "an exported program",
            export_and_load(convolutions(), tmp_path / "free.pt2", dynamic_shapes=free),
        ),
        ("TorchScript", torch.jit.script(convolutions())),
    ):
        subject = subject_of(model, IMAGES)
        for name in ("bf16", "channels-last", "int4-weights", "int8-dynamic", "pruned-25"):
            reason = str(known_forms()[name].applies(subject))
            assert reason.startswith(f"the model is {kind}, whose layers cannot be changed")
