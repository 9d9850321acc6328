"""Refuses a new form whose results are unlike the model's: bugs in compilers and quantizers often
raise no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tsx_runtime.worker.forms.exporting import flat_calls
from tsx_runtime.worker.forms.form import Form, FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.signature import FlatModel, ModelCall

ROWS = 16  # calibration inputs that are compared, about: results may be large
LEAST = 0.25  # share of the variance; forms that answer right explain nearly all of it
LEAST_VARIANCE = 0.05  # as a share of the mean square: for rows whose results are nearly equal

Results = Sequence[Sequence[torch.Tensor]]  # of each call, its tensors


class ModelResults(NamedTuple):
    """The model's results for the last calls, from before the build, which may change the model."""

    calls: Sequence[tuple[torch.Tensor, ...]]
    results: Results

    @classmethod
    def of(cls, subject: Subject) -> ModelResults:
        """Of the last calls."""
        latest: list[ModelCall] = []
        for call in reversed(subject.calls):
            if sum(each.rows for each in latest) < ROWS:
                latest.append(call)
        calls = flat_calls(subject._replace(calls=latest))
        model = FlatModel(subject.model, subject.flat_signature())
        return cls(calls, [model(*tensors) for tensors in calls])

    def check(self, form: Form, source: FormSource) -> None:
        """Raises NotBuilt if the form's results are unlike these."""
        graph = form.load(source)
        share = explained(self.results, [graph(*tensors) for tensors in self.calls])
        if share < LEAST:
            raise NotBuilt(
                "its results have little in common with the model's: over the calibration inputs"
                f" they explain {max(share, 0):.0%} of the variance"
            )


def explained(wanted: Results, found: Results) -> float:
    """The coefficient of determination over all floats: 1 for equal results, 0 for the mean of the
    rows, negative if worse.
    """
    error = variance = 0.0
    for calls, others in zip(zip(*wanted, strict=True), zip(*found, strict=True), strict=True):
        if not calls[0].is_floating_point():
            continue
        own, other = _rows(calls), _rows(others)
        finite = own.isfinite()
        own, other = own.where(finite, 0), other.nan_to_num().where(finite, 0)
        error += float((own - other).square().sum())
        variance += max(
            float((own - own.mean(0)).square().sum()), LEAST_VARIANCE * float(own.square().sum())
        )
    return 1 - error / variance if variance else 1.0


def _rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows in one tensor; if other sizes than the first differ, all numbers."""
    alike = tensors[0].dim() > 0 and len({each.shape[1:] for each in tensors}) == 1
    return torch.cat([each if alike else each.flatten() for each in tensors]).double().cpu()
