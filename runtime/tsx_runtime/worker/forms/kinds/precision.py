"""The archive's own model in half precision, or in the channels-last memory format.

Half precision uses converted weights, or autocast, which keeps sensitive operations in float32.
Converted weights are stored in a file that each worker maps, so that workers share its pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.forms.bound import cpu_instructions
from tsx_runtime.worker.forms.exporting import check_eager, get_module
from tsx_runtime.worker.forms.form import Form, FormSource, Subject
from tsx_runtime.worker.handlers.models.model_files import FixedBatch
from tsx_runtime.worker.handlers.models.precision import DTYPES, call_in, cast, in_precision

FILE = "weights.safetensors"


def check_precision(precision: str, device: torch.device) -> str | None:
    """Explain why this machine gains nothing from a precision; None if it may."""
    if (
        device.type == "cuda"
        and precision == "bf16"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return "this GPU does not compute in bf16"
    if (
        device.type == "cpu"
        and precision == "fp16"
        and not cpu_instructions() & {"avx512_fp16", "amx_fp16"}
    ):
        return "this CPU does not compute in fp16: it has neither avx512_fp16 nor amx_fp16"
    return None


class OwnModelForm(Form):
    """A form that changes the archive's own model in the worker. By default it has no files."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    is_graph: ClassVar[bool] = False

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        return {}


class ChannelsLastForm(OwnModelForm):
    """A form in the channels-last memory format, in which convolutions are faster."""

    bound_to: ClassVar[frozenset[str]] = frozenset()

    def applies(self, subject: Subject) -> str | None:
        return check_eager(subject.model) or (
            None if has_convolutions(subject.model) else "the model has no 2D convolution"
        )

    def load(self, source: FormSource) -> Any:
        """Convert the weights. The first convolution then converts the images for later layers."""
        return source.load_copy().to(memory_format=torch.channels_last)


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


@dataclass(frozen=True)
class ConvertedForm(OwnModelForm):
    precision: str

    bound_to: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def applies(self, subject: Subject) -> str | None:
        return check_eager(subject.model) or check_precision(self.precision, subject.device)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        from safetensors.torch import save_file  # Most models need no safetensors.

        model = subject.model.to(DTYPES[self.precision])
        is_channels_last = has_convolutions(model)
        weights, tied_names, first_names = (
            dict[str, torch.Tensor](),
            dict[str, str](),
            dict[Any, str](),
        )
        for name, _, _, tensor in _iterate_weights(model):
            key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
            if (first_name := first_names.setdefault(key, name)) != name:
                tied_names[name] = first_name
                continue
            if is_channels_last and tensor.dim() == 4:
                tensor = tensor.permute(0, 2, 3, 1)
            weights[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        save_file(weights, directory / FILE)
        return {"tied": tied_names, "channels_last": is_channels_last}

    def load(self, source: FormSource) -> Any:
        from safetensors.torch import load_file

        model = source.load_copy()
        tensors = load_file(source.directory / FILE, device=str(source.device))
        for name, owner, attribute, tensor in list(_iterate_weights(model)):
            weight = tensors[source.settings["tied"].get(name, name)]
            if source.settings["channels_last"] and weight.dim() == 4:
                weight = weight.permute(0, 3, 1, 2)
            if weight.shape != tensor.shape:
                raise LoadError(
                    f"{name} is {tuple(weight.shape)} in {FILE}, and {tuple(tensor.shape)} in the"
                    " model; run tsx optimize again"
                )
            if isinstance(tensor, nn.Parameter):
                weight = nn.Parameter(weight, requires_grad=False)
            setattr(owner, attribute, weight)
        return in_precision(model, self.precision, source.device)


class AutocastForm(ConvertedForm):
    def applies(self, subject: Subject) -> str | None:
        model = subject.model
        if isinstance(model, torch.jit.ScriptModule) or not isinstance(
            model, nn.Module | FixedBatch
        ):
            return f"the model is a {type(model).__name__}, to which autocast does not apply"
        return check_precision(self.precision, subject.device)

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        return {}

    def load(self, source: FormSource) -> Any:
        return AutocastModel(source.reference(), source.device.type, DTYPES[self.precision])


def module_in_precision(precision: str, model: Any) -> nn.Module:
    """Return a module for compilers, whose weights are converted unless `precision` is empty."""
    module = get_module(model)
    return ConvertedModel(module, precision) if precision else module


class ConvertedModel(nn.Module):
    """A module with converted weights that takes and returns float32.

    It casts in `forward`, since an exported graph would not contain hooks.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.training = False
        self.dtype = DTYPES[precision]
        self.model = model.to(self.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_in(self.dtype, self.model, args, kwargs)


class AutocastModel:
    """A model called under autocast, with results in float32.

    Autocast caches cast weights until its outermost context ends, but not in inference mode.
    Therefore the context never ends here, and calls run outside inference mode: each weight is cast
    only once instead of at each call.
    """

    def __init__(self, model: Any, device: str, dtype: torch.dtype) -> None:
        self.model = model
        self.device = device
        self.dtype = dtype
        torch.autocast_increment_nesting()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device, self.dtype):
            args, kwargs = tree_map(copy_if_inference_tensor, (args, kwargs))
            result = self.model(*args, **kwargs)
        return cast(result, torch.float32)

    @property
    def _orig_mod(self) -> Any:
        """The original model, for gradients; torch.compile uses this name."""
        return getattr(self.model, "_orig_mod", self.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def copy_if_inference_tensor(value: Any) -> Any:
    """Return a copy of an inference tensor, and any other value unchanged.

    Inference tensors cannot be changed in place outside inference mode, and a function that was
    compiled for normal tensors would be compiled again for them.
    """
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value


def _iterate_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield (name, owner, attribute, tensor) of each parameter and buffer.

    A tied tensor is yielded once for each of its names.
    """
    for path, owner in model.named_modules():
        for named_tensors in (owner.named_parameters, owner.named_buffers):
            for attribute, tensor in named_tensors(recurse=False, remove_duplicate=False):
                yield f"{path}.{attribute}" if path else attribute, owner, attribute, tensor


FORMS = (
    ChannelsLastForm("channels-last", "channels last"),
    ConvertedForm("bf16", "bf16 weights", "bf16"),
    ConvertedForm("fp16", "fp16 weights", "fp16"),
    AutocastForm("bf16-autocast", "bf16 by autocast", "bf16"),
    AutocastForm("fp16-autocast", "fp16 by autocast", "fp16"),
)
