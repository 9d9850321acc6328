"""The model compiled for AWS's accelerators (Inferentia2, Trainium) by torch-neuronx.

The model is compiled for each of several batch sizes. For torch, such a worker runs on the CPU: the
compiled model takes and returns CPU tensors, and copies them to and from the accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.forms.buckets import (
    BatchBuckets,
    check_fixed_shapes,
    choose_buckets,
    example_batch,
    pad_batch,
    with_fallback,
)
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.forms.signature import FlatModel

DEVICE_DIRECTORY = Path("/dev")
PACKAGE_INDEX = "https://pip.repos.neuron.amazonaws.com"
NO_DEVICE = (
    "this machine has no Neuron device: it needs an instance with Inferentia2 or Trainium (inf2,"
    " trn1)"
)


@dataclass(frozen=True)
class NeuronForm(Form):
    """A form of several traced modules, each for the tensors of one batch size.

    See torch_neuronx.trace. `casts` are arguments of neuronx-cc, its compiler.
    """

    casts: tuple[str, ...] = ()

    packages: ClassVar[Mapping[str, str]] = {
        "torch_neuronx": (
            f"pip install --extra-index-url {PACKAGE_INDEX} 'torch-neuronx==2.9.*'"
            " 'neuronx-cc==2.*', on an inf2 or trn1 instance"
        )
    }
    bound_to: ClassVar[frozenset[str]] = frozenset({"torch", "packages"})

    def applies(self, subject: Subject) -> str | None:
        if not isinstance(subject.model, nn.Module):
            return f"the model is a {type(subject.model).__name__}, not an nn.Module"
        return check_fixed_shapes(subject) or (None if _has_device() else NO_DEVICE)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        _limit_to_one_core()
        import torch_neuronx  # It comes from AWS's own package index.

        signature, buckets = subject.flat_signature(), choose_buckets(subject)
        flat = FlatModel(subject.model, signature)
        for size in buckets.sizes:
            traced = torch_neuronx.trace(
                flat, tuple(example_batch(subject, size)), compiler_args=list(self.casts)
            )
            torch.jit.save(traced, str(directory / _file_name(size)))
        return buckets._asdict()

    def load(self, source: FormSource) -> Callable[..., Any]:
        if not _has_device():
            raise LoadError(NO_DEVICE)
        _limit_to_one_core()
        import torch_neuronx  # noqa: F401  # registers the class of a traced module

        signature, buckets = source.flat_signature(), BatchBuckets.from_json(source.settings)
        load: Any = torch.jit.load  # torch.jit.load has no types.
        models = {size: load(str(source.directory / _file_name(size))) for size in buckets.sizes}

        def run(size: int, rows: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return buckets.cut(models[size](*pad_batch(signature, tensors, size)), rows)

        return with_fallback(buckets, source, run)


def _has_device() -> bool:
    return any(DEVICE_DIRECTORY.glob("neuron[0-9]*"))


def _limit_to_one_core() -> None:
    """Limit this worker to one NeuronCore, before the Neuron runtime starts.

    By default the first worker would take all cores, and leave none for the others.
    """
    os.environ.setdefault("NEURON_RT_NUM_CORES", "1")


def _file_name(size: int) -> str:
    return f"batch-{size}.pt"


FORMS = (
    NeuronForm("neuron", "Neuron", ("--auto-cast", "none")),
    NeuronForm("neuron-bf16", "Neuron, bf16", ("--auto-cast", "all", "--auto-cast-type", "bf16")),
)
