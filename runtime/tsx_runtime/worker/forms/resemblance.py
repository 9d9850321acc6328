"""The check that the results of a new form resemble those of the model.

Many bugs of compilers and quantizers raise no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tsx_runtime.worker.forms.exporting import flat_calls
from tsx_runtime.worker.forms.form import Form, FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.signature import FlatModel, ModelCall

MAX_COMPARED_ROWS = 16  # an approximate limit, since results may be large
MIN_EXPLAINED_VARIANCE = 0.25  # Correct forms explain nearly all variance.
# The smallest variance relative to the mean square. Rows may have nearly equal results.
MIN_VARIANCE_RATIO = 0.05

Results = Sequence[Sequence[torch.Tensor]]  # the tensors of each call


class ModelResults(NamedTuple):
    """The model's results for its last calls.

    They are computed before the build, since it may change the model.
    """

    calls: Sequence[tuple[torch.Tensor, ...]]
    results: Results

    @classmethod
    def of(cls, subject: Subject) -> ModelResults:
        """Repeat the last recorded calls of the model."""
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
            NotBuilt: They have little in common.
        """
        graph = form.load(source)
        explained = explained_variance(self.results, [graph(*tensors) for tensors in self.calls])
        if explained < MIN_EXPLAINED_VARIANCE:
            raise NotBuilt(
                "its results have little in common with the model's: over the calibration inputs"
                f" they explain {max(explained, 0):.0%} of the variance"
            )


def explained_variance(expected: Results, results: Results) -> float:
    """Return the coefficient of determination over all floats.

    It is 1 for equal results, 0 for results that always equal the mean of the rows, and negative
    for worse ones.
    """
    error = variance = 0.0
    for expected_calls, calls in zip(
        zip(*expected, strict=True), zip(*results, strict=True), strict=True
    ):
        if not expected_calls[0].is_floating_point():
            continue
        expected_rows, rows = _join_rows(expected_calls), _join_rows(calls)
        finite = expected_rows.isfinite()
        expected_rows, rows = expected_rows.where(finite, 0), rows.nan_to_num().where(finite, 0)
        error += float((expected_rows - rows).square().sum())
        variance += max(
            float((expected_rows - expected_rows.mean(0)).square().sum()),
            MIN_VARIANCE_RATIO * float(expected_rows.square().sum()),
        )
    return 1 - error / variance if variance else 1.0


def _join_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join all rows in one tensor; if their shapes differ, join all numbers."""
    have_equal_shapes = tensors[0].dim() > 0 and len({tensor.shape[1:] for tensor in tensors}) == 1
    return (
        torch.cat([tensor if have_equal_shapes else tensor.flatten() for tensor in tensors])
        .double()
        .cpu()
    )
