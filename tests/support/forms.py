"""Forms of a model, built and loaded in this process and compared with the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tsx_archiver.metadata.forms import FORMS_DIRECTORY, FORMS_FILE, FormIndex, FormRecord
from tsx_runtime.worker.forms.bound import describe_bound
from tsx_runtime.worker.forms.form import Form, Subject
from tsx_runtime.worker.forms.loading import LoadedForm, load_form
from tsx_runtime.worker.forms.signature import ModelCall, NoSignature, Signature

CPU = torch.device("cpu")
SIZES = (1, 2, 3, 8, 17)  # batch sizes of a comparison

Inputs = Callable[[int], tuple[tuple[Any, ...], Mapping[str, Any]]]  # rows -> (args, kwargs)


class Comparison(NamedTuple):
    loaded: LoadedForm
    # The largest absolute difference, as a fraction of the model's largest absolute result.
    worst: float


def tensor_inputs(*shape: int) -> Inputs:
    """Return a function that makes batches of one float32 tensor with rows of that shape."""
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
    form: Form, model: Any, inputs: Inputs, model_directory: Path, device: torch.device = CPU
) -> FormRecord:
    """Build a form, which must be applicable, in the directory of a model."""
    subject = subject_of(model, inputs, device=device)
    assert form.applies(subject) is None, form.applies(subject)
    directory = model_directory / FORMS_DIRECTORY / form.name
    directory.mkdir(parents=True)
    with torch.no_grad(), _quick_compiles():
        settings = form.build(subject, directory)
    signature = None if subject.signature is None else subject.signature.as_json()
    record = FormRecord(form.name, describe_bound(form, device), settings, signature)
    (model_directory / FORMS_FILE).write_bytes(FormIndex((record,)).content())
    return record


@contextmanager
def _quick_compiles() -> Iterator[None]:
    """Skip torch's trial of vector instructions and its precompiled headers.

    They save no time for a few models.
    """
    # Inductor is patched only if it is imported, since the import takes seconds.
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
        # Detecting the newest instructions would take six compilations.
        patch.setattr(VecISA, "check_build", lambda self, code: False)
        yield


def loaded(
    form: Form, reference: Callable[[], Any], directory: Path, device: torch.device = CPU
) -> LoadedForm:
    return load_form([form.name], directory, {}, reference, device)


def compared(
    form: Form,
    make: Callable[[], Any],
    inputs: Inputs,
    directory: Path,
    sizes: Sequence[int] = SIZES,
    device: torch.device = CPU,
) -> Comparison:
    """Build and load a form, and compare its results with the model's; the form must load.

    `make` makes the same model each time, on the device.
    """
    model = make()
    built(form, make(), inputs, directory, device)
    loaded_form = loaded(form, make, directory, device)
    assert loaded_form.name == form.name, loaded_form.passed_over
    worst = 0.0
    with torch.inference_mode():
        for rows in sizes:
            args, kwargs = inputs(rows)
            expected, actual = (
                tree_leaves(model(*args, **kwargs)),
                tree_leaves(loaded_form.model(*args, **kwargs)),
            )
            assert [tensor.shape for tensor in actual] == [tensor.shape for tensor in expected]
            for reference, result in zip(expected, actual, strict=True):
                scale = max(float(reference.abs().max()), 1e-9)
                worst = max(worst, float((reference.float() - result.float()).abs().max()) / scale)
    return Comparison(loaded_form, worst)
