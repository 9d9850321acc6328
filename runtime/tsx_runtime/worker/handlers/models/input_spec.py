"""The inputs of a model: the shape of a row and its dtype.

These are read from the model's program, from `input_shape`, or from its first layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from tsx_runtime.shared.example_requests import ExampleInput
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.forms.loading import FormModel
from tsx_runtime.worker.handlers.models.model_files import FixedBatch, OnnxModel
from tsx_runtime.worker.handlers.models.precision import Cast

Shape: TypeAlias = tuple[int | None, ...]

# Sizes to try if the first layer takes any size, since later layers may take only one. The most
# common sizes come first.
LENGTHS_TO_TRY = (8, 16, 1, 32, 64, 128, 512)
PIXELS_TO_TRY = (224, 32, 28, 64, 96, 128, 256, 299, 384, 512, 16, 8)
GREY_PIXELS_TO_TRY = (28, 32, 64, 224, 96, 128, 256, 299, 384, 512, 16, 8)

_ONNX_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(double)": torch.float64,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The number of dimensions of free size.
_NORM_DIMENSIONS = {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
# Operations of TorchScript, with the argument positions of the weight and of the number of groups.
_SCRIPT_WEIGHTS = {
    "aten::linear": (1, None),
    "aten::conv1d": (1, 6),
    "aten::conv2d": (1, 6),
    "aten::conv3d": (1, 6),
    "aten::_convolution": (1, 8),
    "aten::embedding": (0, None),
    "aten::embedding_bag": (0, None),
}


class InputSpec(NamedTuple):
    """One input of a model.

    Attributes:
        name: The name of the argument.
        shape: The shape of a row, without the batch; None for an unknown shape or a free size.
        dtype: The dtype, or None if it is unknown.
        certain: Whether the shape is known, and not only guessed from the first layer.
    """

    name: str = ""
    shape: Shape | None = None
    dtype: torch.dtype | None = None
    certain: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether a row may have this shape."""
        return (
            self.shape is not None
            and len(shape) == len(self.shape)
            and all(
                expected in (None, size) for expected, size in zip(self.shape, shape, strict=True)
            )
        )

    @property
    def kind(self) -> str | None:
        """The name of the dtype."""
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def described(self) -> dict[str, Any]:
        """Return the spec as JSON; a free size is null."""
        return {
            "name": self.name,
            "shape": None if self.shape is None else list(self.shape),
            "datatype": self.kind,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads."""
        return {**self.described(), "certain": self.certain}

    @classmethod
    def from_json(cls, spec: Mapping[str, Any]) -> InputSpec:
        """Read the JSON that `as_json` returns."""
        shape, kind = spec["shape"], spec["datatype"]
        return cls(
            spec["name"],
            None if shape is None else tuple(shape),
            None if kind is None else getattr(torch, kind),
            spec["certain"],
        )

    def __str__(self) -> str:
        kind = self.kind or "numbers"
        if self.shape is None:
            return f"rows of {kind}"
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{kind} rows of shape [{sizes}]"


def input_specs(
    model: Any, shape: Shape | Mapping[str, Shape] | None = None, *, casts: bool = False
) -> tuple[InputSpec, ...]:
    """Return the inputs of a model, at least one.

    Args:
        model: The model.
        shape: `input_shape` of model-config.yaml.
        casts: Whether the model takes float32 even if its weights have another dtype.

    Raises:
        LoadError: `shape` names an input that the model does not have.
    """
    specs = list(_specs_of_program(model) or _specs_of_layers(model))
    for index, spec in enumerate(specs):
        if casts and spec.dtype and spec.dtype.is_floating_point:
            specs[index] = spec._replace(dtype=torch.float32)
    if shape is None:
        return tuple(specs)
    shapes = shape if isinstance(shape, Mapping) else {specs[0].name: shape}
    if unknown := shapes.keys() - {spec.name for spec in specs}:
        names = ", ".join(spec.name for spec in specs)
        raise LoadError(
            f"input_shape in model-config.yaml names {', '.join(map(str, unknown))}, but the model"
            f" takes {names}."
        )
    return tuple(
        spec._replace(shape=shapes[spec.name], certain=True) if spec.name in shapes else spec
        for spec in specs
    )


def examples(specs: Sequence[InputSpec]) -> Iterator[list[ExampleInput]]:
    """Yield example rows to try for all inputs, the most probable ones first.

    Free and unknown sizes are equal in all inputs. Nothing is yielded if no shape is known.
    """
    first_shape = specs[0].shape
    if first_shape is None:
        return
    shapes = [first_shape if spec.shape is None else spec.shape for spec in specs]
    free_shape = next((shape for shape in shapes if None in shape), ())
    sizes = (
        (0,)
        if not free_shape
        else LENGTHS_TO_TRY
        if free_shape.count(None) < 2
        else GREY_PIXELS_TO_TRY
        if free_shape[0] == 1
        else PIXELS_TO_TRY
    )
    for size in sizes:
        complete_shapes = [
            tuple(size if expected is None else expected for expected in shape) for shape in shapes
        ]
        yield [
            ExampleInput(spec.name, spec.kind, shape)
            for spec, shape in zip(specs, complete_shapes, strict=True)
        ]


def _specs_of_program(model: Any) -> tuple[InputSpec, ...]:
    """Return the inputs that an exported program, an ONNX model or a form describes."""
    if isinstance(model, FormModel):
        return tuple(map(InputSpec.from_json, model.signature.requests))
    while isinstance(model, FixedBatch | Cast):
        model = model.model
    if isinstance(model, OnnxModel):
        return tuple(
            InputSpec(
                entry.name,
                _row_shape(entry.shape) if entry.shape else None,
                _ONNX_TYPES.get(entry.type),
                bool(entry.shape),
            )
            for entry in model.session.get_inputs()
        )
    if isinstance(model, torch.fx.GraphModule):
        values = {
            str(node.target): node.meta.get("val")
            for node in model.graph.nodes
            if node.op == "placeholder"
        }
        if all(isinstance(value, torch.Tensor) for value in values.values()):
            return tuple(
                InputSpec(name, _row_shape(value.shape), value.dtype, True)
                for name, value in values.items()
            )
    return ()


def _row_shape(shape: Sequence[Any]) -> Shape:
    return tuple(size if isinstance(size, int) else None for size in shape[1:])


def _specs_of_layers(model: Any) -> tuple[InputSpec, ...]:
    """Return the inputs of the first layer, which in most cases are the model's inputs."""
    model = getattr(model, "_orig_mod", model)  # the original model if torch.compile has wrapped it
    while isinstance(model, Cast):
        model = model.model
    names = _argument_names(model) or [""]
    shape, dtype = next(_iterate_layer_inputs(model), (None, None))
    if dtype is None and isinstance(model, nn.Module):
        dtype = next(
            (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), None
        )
    # The input of the first layer, by the position of the model's argument.
    layers: dict[int, tuple[Shape | None, Any]] = {1: (shape, dtype)}
    if isinstance(model, torch.jit.ScriptModule):
        layers |= {
            position: (size, kind)
            for position, size, kind in reversed(list(_iterate_script_layers(model)))
        }
    return tuple(
        InputSpec(name, *layers.get(position, (None, dtype)))
        for position, name in enumerate(names, 1)
    )


def _argument_names(model: Any) -> list[str]:
    """Return the names of the arguments of `forward` that have no default."""
    if isinstance(model, torch.jit.ScriptModule):
        schema = getattr(getattr(model, "forward", None), "schema", None)
        arguments = [] if schema is None else schema.arguments[1:]
        return [argument.name for argument in arguments if not argument.has_default_value()]
    if not isinstance(model, nn.Module):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in positional
    ]


def _iterate_layer_inputs(model: Any) -> Iterator[tuple[Shape, Any]]:
    """Yield the layers' inputs in the order of execution, or else in the order of creation."""
    if isinstance(model, torch.jit.ScriptModule):
        yield from ((shape, dtype) for _, shape, dtype in _iterate_script_layers(model))
        return
    layer: Any
    for layer in _modules_in_order(model) if isinstance(model, nn.Module) else ():
        if isinstance(layer, nn.Linear):
            yield (layer.in_features,), layer.weight.dtype
        elif isinstance(layer, _CONVOLUTIONS):
            yield (layer.in_channels, *[None] * (layer.weight.ndim - 2)), layer.weight.dtype
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            yield (None,), torch.int64
        elif isinstance(layer, nn.RNNBase):
            yield (None, layer.input_size), layer.weight_ih_l0.dtype
        elif type(layer) in _NORM_DIMENSIONS and layer.weight is not None:
            yield (layer.num_features, *[None] * _NORM_DIMENSIONS[type(layer)]), layer.weight.dtype


def _modules_in_order(model: nn.Module) -> list[nn.Module]:
    try:
        graph = torch.fx.Tracer().trace(model)
    # This is only a trial: a `forward` that inspects its input may raise anything.
    except Exception:
        return list(model.modules())
    return [
        model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"
    ]


def _iterate_script_layers(
    model: torch.jit.ScriptModule,
) -> Iterator[tuple[int, Shape, torch.dtype]]:
    """Yield the position of the model's argument, the shape and the dtype of each layer's input."""
    if not hasattr(model, "forward"):
        return
    arguments = list(model.inlined_graph.inputs())
    argument_positions = {
        value.debugName(): index for index, value in enumerate(arguments) if index
    }
    for node in model.inlined_graph.nodes():
        inputs = list(node.inputs())
        source_positions = [
            argument_positions[value.debugName()]
            for value in inputs
            if value.debugName() in argument_positions
        ]
        argument_positions |= {
            value.debugName(): source_positions[0] for value in node.outputs() if source_positions
        }
        weight_position, groups_position = _SCRIPT_WEIGHTS.get(node.kind(), (None, None))
        if weight_position is None:
            continue
        weight = _find_weight(inputs[weight_position], model)
        if not isinstance(weight, torch.Tensor):
            continue
        argument_position = source_positions[0] if source_positions else 0
        if weight_position == 0:
            yield argument_position, (None,), torch.int64
        elif groups_position is None:
            yield argument_position, (weight.shape[1],), weight.dtype
        else:
            group_count: Any = inputs[groups_position].toIValue() or 1
            yield (
                argument_position,
                (weight.shape[1] * group_count, *[None] * (weight.ndim - 2)),
                weight.dtype,
            )


def _find_weight(value: Any, model: Any) -> Any:
    """Return a weight, which is a constant of a frozen graph or an attribute of a module."""
    node = value.node()
    if node.kind() != "prim::GetAttr":
        return (
            value.toIValue()
            if node.kind() == "prim::Constant"
            else model
            if node.kind() == "prim::Param"
            else None
        )
    owner = _find_weight(next(node.inputs()), model)
    return None if owner is None else getattr(owner, node.s("name"), None)
