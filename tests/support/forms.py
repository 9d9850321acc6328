"""Builds and loads a form of a model in this process, and compares its results with the model's own
for several batch sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tsx_archiver.metadata.forms import FORMS_DIRECTORY, FORMS_FILE, FormRecord, KeptForms
from tsx_runtime.worker.forms.bound import bound_of
from tsx_runtime.worker.forms.form import Form, Subject
from tsx_runtime.worker.forms.loading import LoadedForm, load_form
from tsx_runtime.worker.forms.signature import ModelCall, NoSignature, Signature

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 8, 17)  # of batches that a form is proven with

Inputs = Callable[[int], tuple[tuple[Any, ...], Mapping[str, Any]]]  # rows -> (args, kwargs)


class Comparison(NamedTuple):
    loaded: LoadedForm
    # largest absolute difference, as a share of the largest absolute number of the model's own
    # result
    worst: float


def tensor_inputs(*shape: int) -> Inputs:
    """Batches of one float32 tensor with rows of that shape."""
    return lambda rows: (
        (torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows)),),
        {},
    )


def subject_of(
    model: Any, inputs: Inputs, sizes: Sequence[int] = (2, 3, 8), device: torch.device = CPU
) -> Subject:
    calls = [ModelCall(*inputs(rows), rows) for rows in sizes]
    try:
        return Subject(model, calls, Signature.of(model, calls), "", device)
    except NoSignature as error:
        return Subject(model, calls, None, str(error), device)


def built(
    form: Form, model: Any, inputs: Inputs, place: Path, device: torch.device = CPU
) -> FormRecord:
    """In `place`, as in an archive's directory. Raises AssertionError where it does not apply."""
    subject = subject_of(model, inputs, device=device)
    assert form.applies(subject) is None, form.applies(subject)
    directory = place / FORMS_DIRECTORY / form.name
    directory.mkdir(parents=True)
    with torch.no_grad(), _quick_compiles():
        settings = form.build(subject, directory)
    signature = None if subject.signature is None else subject.signature.as_json()
    record = FormRecord(form.name, bound_of(form, device), settings, signature)
    (place / FORMS_FILE).write_bytes(KeptForms((record,)).content())
    return record


@contextmanager
def _quick_compiles() -> Iterator[None]:
    """Torch does not try how this machine compiles vectors, and compiles none of its headers for
    later: for few models neither pays.
    """
    # Which takes seconds, and which other forms do without.
    if "torch._inductor" not in sys.modules:
        yield
        return
    from torch._inductor.cpu_vec_isa import VecISA

    quick = {
        "cpp.vec_isa_ok": True,
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    with torch._inductor.config.patch(quick), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            VecISA, "check_build", lambda self, code: False
        )  # the newest instructions: six compilations
        yield


def loaded(
    form: Form, reference: Callable[[], Any], place: Path, device: torch.device = CPU
) -> LoadedForm:
    return load_form([form.name], place, {}, reference, device)


def compared(
    form: Form,
    make: Callable[[], Any],
    inputs: Inputs,
    place: Path,
    sizes: Sequence[int] = SIZES,
    device: torch.device = CPU,
) -> Comparison:
    """`make` makes the same model each time, on the device.

    Raises AssertionError where the form is not what is loaded.
    """
    model = make()
    built(form, make(), inputs, place, device)
    found = loaded(form, make, place, device)
    assert found.name == form.name, found.passed_over
    worst = 0.0
    with torch.inference_mode():
        for rows in sizes:
            args, kwargs = inputs(rows)
            expected, actual = (
                tree_leaves(model(*args, **kwargs)),
                tree_leaves(found.model(*args, **kwargs)),
            )
            assert [each.shape for each in actual] == [each.shape for each in expected]
            for one, other in zip(expected, actual, strict=True):
                scale = max(float(one.abs().max()), 1e-9)
                worst = max(worst, float((one.float() - other.float()).abs().max()) / scale)
    return Comparison(found, worst)
