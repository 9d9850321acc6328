"""What a model takes: the shape of a row and the type of its numbers, from its program, from
`input_shape`, or from its first layer.
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

# Sizes to try where any size fits, or only one that the layers after the first one want: those that
# people train with come first.
LENGTHS = (8, 16, 1, 32, 64, 128, 512)
PIXELS = (224, 32, 28, 64, 96, 128, 256, 299, 384, 512, 16, 8)
GREY_PIXELS = (28, 32, 64, 224, 96, 128, 256, 299, 384, 512, 16, 8)

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
_NORMS = {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}  # and their free dimensions
# of TorchScript's operations: which input is the weight, and which the number of groups
_WEIGHTS = {
    "aten::linear": (1, None),
    "aten::conv1d": (1, 6),
    "aten::conv2d": (1, 6),
    "aten::conv3d": (1, 6),
    "aten::_convolution": (1, 8),
    "aten::embedding": (0, None),
    "aten::embedding_bag": (0, None),
}


class InputSpec(NamedTuple):
    """One input of a model."""

    name: str = ""
    shape: Shape | None = (
        # of a row, without the dimension of the batch; None where a size is free, or all is unknown
        None
    )
    dtype: torch.dtype | None = None
    certain: bool = False  # else it is what the first layer suggests, and only the model can tell

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a row may have this shape."""
        return (
            self.shape is not None
            and len(shape) == len(self.shape)
            and all(own in (None, size) for own, size in zip(self.shape, shape, strict=True))
        )

    @property
    def kind(self) -> str | None:
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def described(self) -> dict[str, Any]:
        """As JSON. A free size is null."""
        return {
            "name": self.name,
            "shape": None if self.shape is None else list(self.shape),
            "datatype": self.kind,
        }

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**self.described(), "certain": self.certain}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> InputSpec:
        shape, kind = given["shape"], given["datatype"]
        return cls(
            given["name"],
            None if shape is None else tuple(shape),
            None if kind is None else getattr(torch, kind),
            given["certain"],
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
    """At least one. `shape` is what model-config.yaml says.

    `casts`: the model takes float32 whatever its weights are.
    """
    specs = list(_of_program(model) or _of_layers(model))
    for place, spec in enumerate(specs):
        if casts and spec.dtype and spec.dtype.is_floating_point:
            specs[place] = spec._replace(dtype=torch.float32)
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
    """What to try for a row of each input, the likeliest first.

    What is free, or unknown, is the same in all. None without any.
    """
    first = specs[0].shape
    if first is None:
        return
    shapes = [first if spec.shape is None else spec.shape for spec in specs]
    free = next((shape for shape in shapes if None in shape), ())
    sizes = (
        (0,)
        if not free
        else LENGTHS
        if free.count(None) < 2
        else GREY_PIXELS
        if free[0] == 1
        else PIXELS
    )
    for size in sizes:
        filled = [tuple(size if own is None else own for own in shape) for shape in shapes]
        yield [
            ExampleInput(spec.name, spec.kind, shape)
            for spec, shape in zip(specs, filled, strict=True)
        ]


def _of_program(model: Any) -> tuple[InputSpec, ...]:
    """An exported program and an ONNX model describe their inputs; a form has a description of its
    original's.
    """
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


def _of_layers(model: Any) -> tuple[InputSpec, ...]:
    """What the first layer takes is what the model takes, most often."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    while isinstance(model, Cast):
        model = model.model
    names = _names(model) or [""]
    shape, dtype = next(_layers(model), (None, None))
    if dtype is None and isinstance(model, nn.Module):
        dtype = next(
            (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), None
        )
    behind: dict[int, tuple[Shape | None, Any]] = {1: (shape, dtype)}  # by the argument's place
    if isinstance(model, torch.jit.ScriptModule):
        behind |= {
            place: (size, kind) for place, size, kind in reversed(list(_script_layers(model)))
        }
    return tuple(
        InputSpec(name, *behind.get(place, (None, dtype))) for place, name in enumerate(names, 1)
    )


def _names(model: Any) -> list[str]:
    """The arguments of its forward that have no default."""
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


def _layers(model: Any) -> Iterator[tuple[Shape, Any]]:
    """What its layers take, in the order of execution, or else in the order in which they were
    made.
    """
    if isinstance(model, torch.jit.ScriptModule):
        yield from ((shape, dtype) for _, shape, dtype in _script_layers(model))
        return
    layer: Any
    for layer in _modules(model) if isinstance(model, nn.Module) else ():
        if isinstance(layer, nn.Linear):
            yield (layer.in_features,), layer.weight.dtype
        elif isinstance(layer, _CONVOLUTIONS):
            yield (layer.in_channels, *[None] * (layer.weight.ndim - 2)), layer.weight.dtype
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            yield (None,), torch.int64
        elif isinstance(layer, nn.RNNBase):
            yield (None, layer.input_size), layer.weight_ih_l0.dtype
        elif type(layer) in _NORMS and layer.weight is not None:
            yield (layer.num_features, *[None] * _NORMS[type(layer)]), layer.weight.dtype


def _modules(model: nn.Module) -> list[nn.Module]:
    try:
        graph = torch.fx.Tracer().trace(model)
    except Exception:  # whatever a forward raises that looks at its input: only a trial
        return list(model.modules())
    return [
        model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"
    ]


def _script_layers(model: torch.jit.ScriptModule) -> Iterator[tuple[int, Shape, torch.dtype]]:
    """Yield the place of the argument that a layer computes from, with what the layer takes."""
    if not hasattr(model, "forward"):
        return
    arguments = list(model.inlined_graph.inputs())
    origins = {value.debugName(): place for place, value in enumerate(arguments) if place}
    for node in model.inlined_graph.nodes():
        inputs = list(node.inputs())
        sources = [origins[value.debugName()] for value in inputs if value.debugName() in origins]
        origins |= {value.debugName(): sources[0] for value in node.outputs() if sources}
        place, groups = _WEIGHTS.get(node.kind(), (None, None))
        if place is None:
            continue
        weight = _constant(inputs[place], model)
        if not isinstance(weight, torch.Tensor):
            continue
        origin = sources[0] if sources else 0
        if place == 0:
            yield origin, (None,), torch.int64
        elif groups is None:
            yield origin, (weight.shape[1],), weight.dtype
        else:
            count: Any = inputs[groups].toIValue() or 1
            yield origin, (weight.shape[1] * count, *[None] * (weight.ndim - 2)), weight.dtype


def _constant(value: Any, model: Any) -> Any:
    """A weight: a constant of the graph where the model is frozen, else an attribute of one of its
    modules.
    """
    node = value.node()
    if node.kind() != "prim::GetAttr":
        return (
            value.toIValue()
            if node.kind() == "prim::Constant"
            else model
            if node.kind() == "prim::Param"
            else None
        )
    owner = _constant(next(node.inputs()), model)
    return None if owner is None else getattr(owner, node.s("name"), None)
