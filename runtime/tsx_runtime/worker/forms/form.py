"""The interface of a form.

Each module of `kinds` defines some forms in `FORMS`; a new kind of form is a new module there.
"""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from tsx_runtime.worker.forms.signature import FlatModel, ModelCall, Signature

EXTRA = re.compile(r"tsx-serve\[([\w-]+)\]")


class NotBuilt(Exception):
    """The error of a form that cannot be built; its text is the reason."""


class Subject(NamedTuple):
    """The model of which a form is built.

    Attributes:
        model: The archive's own model, as its handler calls it: usually an nn.Module in eval mode.
        calls: The handler's calls for the calibration inputs, in batches of several sizes.
        signature: The signature that these calls have in common.
        no_signature: The reason why there is none.
        device: The device of the model.
    """

    model: Any
    calls: Sequence[ModelCall]
    signature: Signature | None
    no_signature: str
    device: torch.device

    def flat_signature(self) -> Signature:
        """Return the signature.

        Raises:
            NotBuilt: There is none.
        """
        if self.signature is None:
            raise NotBuilt(self.no_signature)
        return self.signature


class FormSource(NamedTuple):
    """The parts from which a form is loaded.

    Attributes:
        directory: The files that `build` has written.
        settings: The result of `build`.
        signature: The signature of the model's calls.
        reference: Loads the archive's own model at the first call, and returns it at later ones.
        load_copy: Loads another copy of that model, which the form may change.
        device: The device of the worker.
    """

    directory: Path
    settings: Mapping[str, Any]
    signature: Signature | None
    reference: Callable[[], Any]
    load_copy: Callable[[], Any]
    device: torch.device

    def flat_signature(self) -> Signature:
        """Return the signature, which a graph always has."""
        assert self.signature is not None
        return self.signature

    def run_original(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the archive's own model with the tensors of a graph."""
        result: tuple[torch.Tensor, ...] = FlatModel(self.reference(), self.flat_signature())(
            *tensors
        )
        return result


@dataclass(frozen=True)
class Form(ABC):
    """One form. Only its methods import heavy packages.

    Attributes:
        name: Lower-case words joined by hyphens.
        label: The name in reports.
        packages: The modules to import, with the commands that install them.
        devices: The device types on which the form runs.
        bound_to: Any of "cpu" (instructions by which libraries choose kernels), "native" (all
            instructions: files compiled for this very CPU end the process if one is missing),
            "torch" (its version), "gpu" and "packages".
        is_graph: Whether `load` returns a function of the flat tensors of a `Signature`. If not, it
            returns a model to call as the original.
        compiles: Whether `load` has C++ compiled.
    """

    name: str
    label: str

    packages: ClassVar[Mapping[str, str]] = {}
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    bound_to: ClassVar[frozenset[str]] = frozenset({"torch"})
    is_graph: ClassVar[bool] = True
    compiles: ClassVar[bool] = False

    @property
    def extras(self) -> list[str]:
        """The extras of tsx-serve that install `packages`."""
        return sorted(
            {extra for command in self.packages.values() for extra in EXTRA.findall(command)}
        )

    def missing(self) -> str | None:
        """Return which package is missing, and how to install it; None if none is."""
        return next(
            (
                f"{name} is not installed: {command}"
                for name, command in self.packages.items()
                if not importlib.util.find_spec(name)
            ),
            None,
        )

    @abstractmethod
    def applies(self, subject: Subject) -> str | None:
        """Explain quickly, without a full stop, why the form cannot be built.

        Returns:
            None if `build` is worth a try.
        """

    @abstractmethod
    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Write the form's files into the empty `directory`, and return JSON for `load`.

        It runs in its own process, and may change the settings of torch there.

        Raises:
            NotBuilt: The form does not fit the model.
            Exception: A library has failed.
        """

    @abstractmethod
    def load(self, source: FormSource) -> Callable[..., Any]:
        """Load the form in a worker, before its first batch, without unpickling.

        Returns:
            A graph (see `is_graph`), which gets contiguous tensors on the device and returns a
            sequence of tensors, or a model to call as the original.

        Raises:
            Exception: A library has failed.
        """
