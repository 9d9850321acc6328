"""Whether a form that was just built gives anything like its model's results: compilers and quantizers have bugs, which raise nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tsx_runtime.worker.forms.form import Form, FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.signature import FlatModel

ROWS = 16  # of the calibration inputs, about: results may be large
LEAST = 0.25  # forms that answer right explain nearly all of the variance
ALIKE = 0.05  # of the mean square: where the rows vary less, an error is compared with that

Results = Sequence[Sequence[torch.Tensor]]  # of each call, its tensors


class ModelResults(NamedTuple):
    """What a form must resemble; taken before it is built, since a build may change the model."""

    calls: Sequence[tuple[torch.Tensor, ...]]
    results: Results

    @classmethod
    def of(cls, subject: Subject) -> ModelResults:
        """Of the last calls."""
        signature = subject.signature
        assert signature is not None
        calls: list[tuple[torch.Tensor, ...]] = []
        rows = 0
        for call in reversed(subject.calls):
            tensors = signature.tensors(call.args, call.kwargs)
            if tensors is not None and rows < ROWS:
                calls.append(tuple(each.contiguous() for each in tensors))
                rows += call.rows
        model = FlatModel(subject.model, signature)
        return cls(calls, [model(*tensors) for tensors in calls])

    def check(self, form: Form, source: FormSource) -> None:
        """Raises NotBuilt where the form's results are others."""
        graph = form.load(source)
        share = explained(self.results, [graph(*tensors) for tensors in self.calls])
        if share < LEAST:
            raise NotBuilt(
                f"its results have little in common with the model's: they explain {max(share, 0):.0%} of the variance of these "
                "over the calibration inputs"
            )


def explained(wanted: Results, found: Results) -> float:
    """The coefficient of determination over all floats: 1 for equal results, 0 for the mean of the rows, below 0 for worse."""
    error = unit = 0.0
    for calls, others in zip(zip(*wanted, strict=True), zip(*found, strict=True), strict=True):
        if not calls[0].is_floating_point():
            continue
        own, other = _rows(calls), _rows(others)
        finite = own.isfinite()
        own, other = own.where(finite, 0), other.nan_to_num().where(finite, 0)
        error += float((own - other).square().sum())
        unit += max(float((own - own.mean(0)).square().sum()), ALIKE * float(own.square().sum()))
    return 1 - error / unit if unit else 1.0


def _rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after another; where they differ in other sizes than the first, all their numbers."""
    alike = tensors[0].dim() > 0 and len({each.shape[1:] for each in tensors}) == 1
    return torch.cat([each if alike else each.flatten() for each in tensors]).double().cpu()
