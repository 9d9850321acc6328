"""Forms that AOTInductor compiles ahead of time into a package of machine code.

A worker needs only torch to load it.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from tsx_runtime.worker.forms.exporting import SizeRange, check_exportable, get_module, size_ranges
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.handlers.models.model_files import load_aotinductor

FILE = "model.pt2"
# Weights become constants. The number of threads is read at run time, as a worker's cores change.
INDUCTOR_OPTIONS = {"freezing": True, "cpp.dynamic_threads": True}
_CHANNEL_PADDING = (0, 0, 0, 0, 0, 1)  # adds one channel to images or weights
INSTALL_COMMAND = "pip install 'tsx-serve[optimize]'"


def check_compiler() -> str | None:
    """Explain why there is no C++ compiler; None if there is one."""
    # Importing the compiler takes seconds.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler is found: install g++, or set CXX"
    return None


class TwoChannelConvolution(nn.Module):
    """A convolution of one channel that is computed with a second channel of zeros.

    It avoids a bug of torch 2.13: for one channel and a free batch size, Inductor with frozen
    weights mistakes the memory format (`_prepare_convolution_fusion_create` in mkldnn_ir.py), so
    that the following layers misread the result.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.training = False
        self.layer = layer
        layer.in_channels = 2
        layer.weight = nn.Parameter(
            functional.pad(layer.weight, _CHANNEL_PADDING), requires_grad=False
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(functional.pad(images, _CHANNEL_PADDING))
        return result


def prepare_for_inductor(model: Any) -> nn.Module:
    """Change the model in place into a module that Inductor compiles correctly."""
    module = get_module(model)
    for owner in list(module.modules()):
        for name, layer in owner.named_children():
            if isinstance(layer, nn.Conv2d) and layer.in_channels == 1:
                setattr(owner, name, TwoChannelConvolution(layer))
    return module


class MachineCodeForm(Form):
    """A form that is one compiled package, which includes the weights.

    `build` needs `tools` and a C++ compiler; `load` needs neither.
    """

    tools: ClassVar[tuple[str, ...]] = ("torchao",)
    bound_to: ClassVar[frozenset[str]] = frozenset({"native", "torch"})

    @abstractmethod
    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        """Return the program to compile, which takes and returns the signature's flat tensors.

        Raises:
            NotBuilt: The form does not fit the model.
            Exception: A library has failed.
        """

    def applies(self, subject: Subject) -> str | None:
        missing = (
            f"{name} is not installed: {INSTALL_COMMAND}"
            for name in self.tools
            if not importlib.util.find_spec(name)
        )
        return next(missing, None) or check_exportable(subject) or check_compiler()

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        from torch._inductor import aoti_compile_and_package

        program = self.program(subject)
        ranges = size_ranges(program, subject.flat_signature())
        aoti_compile_and_package(
            program, package_path=str(directory / FILE), inductor_configs=INDUCTOR_OPTIONS
        )
        return {"sizes": [size_range._asdict() for size_range in ranges]}

    def load(self, source: FormSource) -> Callable[..., Any]:
        """Load the package; calls with other sizes are answered by the archive's own model.

        The compiled code does not check sizes, and would read beyond the end of a tensor.
        """
        loader = load_aotinductor(source.directory / FILE, source.device, source.device.type).loader
        ranges = [SizeRange(**fields) for fields in source.settings["sizes"]]

        def run(*tensors: torch.Tensor) -> Any:
            if not all(size_range.holds(tensors) for size_range in ranges):
                return source.run_original(*tensors)
            return loader.boxed_run(list(tensors))

        return run
