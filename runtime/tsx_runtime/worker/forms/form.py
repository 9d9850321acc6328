"""The interface of a form.

Each module of `kinds` lists its forms in `FORMS`. A new kind of form needs only a new module there.
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

EXTRA_PATTERN = re.compile(r"tsx-serve\[([\w-]+)\]")


class NotBuilt(Exception):
    """The error if a form cannot be built; its text is the reason."""


class Subject(NamedTuple):
    """The model from which a form is built.

    Attributes:
        model: The archive's own model, as its handler calls it: usually an nn.Module in eval mode.
        calls: The handler's calls for the calibration inputs, in batches of several sizes.
        signature: The common signature of these calls, or None.
        no_signature: The reason why they have none.
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
            NotBuilt: The calls have no common signature.
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
        reference: Returns the archive's own model, which the first call loads.
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
        """Return the signature, which every form that is a graph has."""
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
    """A form of a model. Only its methods import heavy packages.

    Attributes:
        name: Lower-case words joined by hyphens.
        label: The name in reports.
        packages: The required modules, and the command that installs each.
        devices: The device types on which the form runs.
        bound_to: The properties that must be equal at build and load. Any of "cpu" (the
            instructions by which libraries choose kernels), "native" (all instructions of the CPU:
            compiled files end the process if one is missing), "torch" (its version), "gpu" and
            "packages" (their versions).
        is_graph: Whether `load` returns a function of the flat tensors of a `Signature`. If not, it
            returns a model to call as the original.
        compiles: Whether `load` compiles C++.
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
            {
                extra
                for command in self.packages.values()
                for extra in EXTRA_PATTERN.findall(command)
            }
        )

    def missing(self) -> str | None:
        """Name a missing package, and how to install it; None if all are installed."""
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
        """Explain, after a quick check, why the form cannot be built.

        Returns:
            The reason without a full stop; None if `build` is worth a try.
        """

    @abstractmethod
    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Write the form's files into the empty `directory`, and return JSON settings for `load`.

        This runs in a process of its own, and may change torch's settings there.

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
