"""The interface of a form.

Each module of `kinds` defines some, in `FORMS`; a new kind of form is a new module there.
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
    """Why a form of a model cannot be built, in words."""


class Subject(NamedTuple):
    """What a form is built from."""

    model: Any  # the archive's own, as its handler calls it: usually an nn.Module in eval mode
    calls: Sequence[
        ModelCall
    ]  # how the handler called it for the calibration inputs, in batches of several sizes
    signature: Signature | None  # that these calls have in common
    no_signature: str  # why there is none
    device: torch.device

    def flat_signature(self) -> Signature:
        """Raises NotBuilt if there is none."""
        if self.signature is None:
            raise NotBuilt(self.no_signature)
        return self.signature


class FormSource(NamedTuple):
    """What a form is loaded from."""

    directory: Path  # the files that `build` has written
    settings: Mapping[str, Any]  # what `build` has returned
    signature: Signature | None
    reference: Callable[
        [], Any
    ]  # loads the archive's own model, at the first call; later calls return the same
    fresh: Callable[[], Any]  # loads another one, which the form may change
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
    """One form. Heavy packages are imported in its methods only."""

    name: str  # lower-case words joined by hyphens
    label: str  # in words, for reports

    packages: ClassVar[Mapping[str, str]] = {}  # module to import -> the command that installs it
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})  # device types that it runs on
    # Of "cpu" (its instructions by which libraries choose kernels), "native" (all of its
    # instructions: files compiled for this very CPU end the process where one is missing), "torch"
    # (its version), "gpu", "packages".
    bound_to: ClassVar[frozenset[str]] = frozenset({"torch"})
    is_graph: ClassVar[bool] = (
        # `load` returns a function of flat tensors, as `Signature` has them; else a model called as
        # the original
        True
    )

    compiles: ClassVar[bool] = False  # `load` has C++ compiled

    @property
    def extras(self) -> list[str]:
        """The extras of tsx-serve that install `packages`."""
        return sorted({extra for how in self.packages.values() for extra in EXTRA.findall(how)})

    def missing(self) -> str | None:
        """Which package is missing, and how to install it."""
        return next(
            (
                f"{name} is not installed: {how}"
                for name, how in self.packages.items()
                if not importlib.util.find_spec(name)
            ),
            None,
        )

    @abstractmethod
    def applies(self, subject: Subject) -> str | None:
        """Why it cannot be built, without a full stop; None if `build` is worth a try. It is
        quick.
        """

    @abstractmethod
    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        """Write its files into the empty `directory`; returns JSON for `load`.

        Runs in a process of its own, whose torch settings it may
        change. Raises NotBuilt, or whatever its libraries raise.
        """

    @abstractmethod
    def load(self, source: FormSource) -> Callable[..., Any]:
        """Runs in a worker, before its first batch.

        Returns a graph (see `is_graph`), which gets contiguous tensors on the device and
        returns a sequence of tensors, or a model to call as the original. Unpickles nothing. May
        raise whatever its libraries raise.
        """
