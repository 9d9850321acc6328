"""The setting `precision` of model-config.yaml: the floating point type in which a model computes.

The weights are converted once, when the model is loaded. Unlike autocast at each call, this costs
no time and halves their memory. Inputs are cast before the model, and results are cast to float32
afterwards, so that the steps of a handler need no change. The precision of a compiled or exported
model is fixed, and is only checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map  # torch.export builds its results with this module.

from tsx_runtime.worker.exceptions import LoadError, error_text
from tsx_runtime.worker.handlers.models.model_files import FixedBatch, OnnxModel, constants_of

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ONNX_TYPES = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}


def configured_precision(config: Mapping[str, Any]) -> str | None:
    """Return the configured precision, or None.

    Raises:
        LoadError: There is no such precision.
    """
    value = config.get("precision")
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in DTYPES:
        raise LoadError(
            f"precision in model-config.yaml is {value!r}; it must be {', '.join(DTYPES)}"
        )
    return value.lower()


def in_precision(model: Any, precision: str, device: torch.device) -> Any:
    """Return the model in a precision; it takes and returns float32 as before.

    Raises:
        LoadError: The model cannot be converted, or the device does not support the precision.
    """
    dtype = DTYPES[precision]
    _check_device(precision, dtype, device)
    if isinstance(model, OnnxModel):
        _check_types(
            {
                ONNX_TYPES.get(entry.type)
                for entry in model.session.get_inputs()
                if "float" in entry.type
            },
            precision,
        )
        return Cast(model, dtype)
    if isinstance(model, FixedBatch | torch.fx.GraphModule):
        tensors = (*model.parameters(), *model.buffers())
        _check_types({tensor.dtype for tensor in tensors if tensor.is_floating_point()}, precision)
        return Cast(model, dtype)
    if isinstance(model, torch.jit.ScriptModule):
        _check_script(model, precision)
        return Cast(model.to(dtype), dtype)
    if not isinstance(model, nn.Module):
        raise LoadError(
            f"precision: {precision} cannot be given to a {type(model).__name__}, whose precision"
            f" was fixed when it was compiled: compile it in {precision}, and remove the key from"
            " model-config.yaml."
        )
    model.to(dtype)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: cast((args, kwargs), dtype), with_kwargs=True
    )
    model.register_forward_hook(lambda _, args, result: cast(result, torch.float32))
    return model


class Cast:
    """A wrapper that casts the inputs and outputs of a model that is not an eager module."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_in(self.dtype, self.model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def call_in(dtype: torch.dtype, model: Any, args: Any, kwargs: Any) -> Any:
    """Call a model with arguments in `dtype`, and return its results in float32."""
    args, kwargs = cast((args, kwargs), dtype)
    return cast(model(*args, **kwargs), torch.float32)


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast all floating point tensors in nested values, and keep other values."""
    if isinstance(values, torch.Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    # Common types are handled here, since compilers cannot trace pytree after a library has
    # registered types.
    if type(values) in (tuple, list):
        return type(values)([cast(value, dtype) for value in values])
    if type(values) is dict:
        return {name: cast(value, dtype) for name, value in values.items()}
    return tree_map(
        lambda value: cast(value, dtype) if isinstance(value, torch.Tensor) else value, values
    )


def _check_device(precision: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check that torch has the most common operations for a dtype on a device.

    Raises:
        LoadError: An operation is missing.
    """
    try:
        unit_tensor = torch.ones(1, 1, 1, 1, dtype=dtype, device=device)
        nn.functional.linear(unit_tensor, unit_tensor[0, 0])
        nn.functional.conv2d(unit_tensor, unit_tensor)
    except (RuntimeError, TypeError) as error:  # Apple's devices raise TypeError.
        text = error_text(error).strip().partition("\n")[0]
        raise LoadError(
            f"precision: {precision} is not available on {device} with torch {torch.__version__}:"
            f" {text}"
        ) from error


def _check_types(dtypes: set[torch.dtype | None], precision: str) -> None:
    if dtypes - {DTYPES[precision]}:
        precision_names = ", ".join(
            sorted(
                "another" if dtype is None else str(dtype).removeprefix("torch.")
                for dtype in dtypes
            )
        )
        raise LoadError(
            f"precision: {precision} cannot be given to this model: it was exported in"
            f" {precision_names}, and its graph contains that precision. Export it in {precision},"
            " or remove the key from model-config.yaml."
        )


def _check_script(model: Any, precision: str) -> None:
    """Check the weights of a frozen model, which are constants of its graph.

    Raises:
        LoadError: The weights have another precision.
    """
    if any(
        value.is_floating_point() and value.ndim and value.dtype != DTYPES[precision]
        for value in constants_of(model)
    ):
        raise LoadError(
            f"precision: {precision} cannot be given to this model: it is frozen TorchScript, whose"
            f" weights are constants. Freeze it in {precision}, pack it without torch.jit.freeze,"
            " or remove the key from model-config.yaml."
        )
