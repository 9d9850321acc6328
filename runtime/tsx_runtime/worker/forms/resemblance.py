"""The check that a new form's results resemble the model's.

Bugs in compilers and quantizers often raise no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tsx_runtime.worker.forms.exporting import flat_calls
from tsx_runtime.worker.forms.form import Form, FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.signature import FlatModel, ModelCall

MAX_COMPARED_ROWS = 16  # about, since results may be large
MIN_EXPLAINED = 0.25  # Correct forms explain nearly all of the variance.
MIN_VARIANCE = 0.05  # a share of the mean square, for rows whose results are nearly equal

Results = Sequence[Sequence[torch.Tensor]]  # the tensors of each call


class ModelResults(NamedTuple):
    """The model's results for its last calls.

    They are computed before the build, which may change the model.
    """

    calls: Sequence[tuple[torch.Tensor, ...]]
    results: Results

    @classmethod
    def of(cls, subject: Subject) -> ModelResults:
        """Call the model for its last calls."""
        latest: list[ModelCall] = []
        for call in reversed(subject.calls):
            if sum(call.rows for call in latest) < MAX_COMPARED_ROWS:
                latest.append(call)
        calls = flat_calls(subject._replace(calls=latest))
        model = FlatModel(subject.model, subject.flat_signature())
        return cls(calls, [model(*tensors) for tensors in calls])

    def check(self, form: Form, source: FormSource) -> None:
        """Check that the form's results resemble these.

        Raises:
            NotBuilt: They do not.
        """
        graph = form.load(source)
        share = explained_variance(self.results, [graph(*tensors) for tensors in self.calls])
        if share < MIN_EXPLAINED:
            raise NotBuilt(
                "its results have little in common with the model's: over the calibration inputs"
                f" they explain {max(share, 0):.0%} of the variance"
            )


def explained_variance(expected: Results, results: Results) -> float:
    """Return the coefficient of determination over all floats.

    It is 1 for equal results, 0 for the mean of the rows, and negative if worse.
    """
    error = variance = 0.0
    for expected_calls, calls in zip(
        zip(*expected, strict=True), zip(*results, strict=True), strict=True
    ):
        if not expected_calls[0].is_floating_point():
            continue
        truth, output = _rows(expected_calls), _rows(calls)
        finite = truth.isfinite()
        truth, output = truth.where(finite, 0), output.nan_to_num().where(finite, 0)
        error += float((truth - output).square().sum())
        variance += max(
            float((truth - truth.mean(0)).square().sum()),
            MIN_VARIANCE * float(truth.square().sum()),
        )
    return 1 - error / variance if variance else 1.0


def _rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all rows in one tensor; if other sizes than the first differ, all numbers."""
    is_alike = tensors[0].dim() > 0 and len({tensor.shape[1:] for tensor in tensors}) == 1
    return (
        torch.cat([tensor if is_alike else tensor.flatten() for tensor in tensors]).double().cpu()
    )
