"""The signature of a model's calls: the tensors, their shapes, and the structure of the result.

A graph (ONNX, OpenVINO, AOTInductor, ...) takes and returns a flat list of tensors. A signature,
which is derived from real calls, translates: it extracts the tensors from the arguments of a call,
and builds the result that the original model would have returned.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

# torch.export flattens arguments and results with this module, too.
from torch.utils import _pytree as pytree

MAX_EXPORTED_BATCH = 4096
FREE = None  # a size in a shape that differs between calls
# Arguments of these types are constants of the signature.
PLAIN_TYPES = (bool, int, float, str, type(None))


class NoSignature(ValueError):
    """The error if calls have no common signature; its text is the reason."""


class ModelCall(NamedTuple):
    """A call of the model by its handler, for a batch of `rows` requests."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int


class TensorInput(NamedTuple):
    """A tensor among the arguments.

    In `shape`, a size that differs between calls is None. `rows` are the dimensions that have the
    batch size.
    """

    dtype: str  # such as "float32"
    shape: tuple[int | None, ...]
    rows: tuple[int, ...]


class Signature(NamedTuple):
    """The signature of a model's calls.

    Attributes:
        arguments_spec: The structure of (args, kwargs), written by torch's pytree.
        constants: The position among the leaves, and the value, of each argument that is not a
            tensor.
        inputs: The tensors among the arguments.
        result_spec: The structure of the result.
        outputs: The number of tensors in the result.
        requests: The tensors that BaseHandler reads from a request (`InputSpec.as_json`).
    """

    arguments_spec: str
    constants: tuple[tuple[int, Any], ...]
    inputs: tuple[TensorInput, ...]
    result_spec: str
    outputs: int
    requests: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, model: Any, calls: Sequence[ModelCall]) -> Signature:
        """Derive the signature from calls; the model is called once to get a result.

        Raises:
            NoSignature: The calls have no common signature.
        """
        if not calls:
            raise NoSignature("its handler did not call self.model")
        flat_calls = [pytree.tree_flatten((call.args, dict(call.kwargs))) for call in calls]
        specs = {_dump_spec(spec) for _, spec in flat_calls}
        if len(specs) > 1:
            raise NoSignature("its handler calls the model with arguments of different structure")
        leaves = [leaves for leaves, _ in flat_calls]
        positions = [
            position for position, leaf in enumerate(leaves[0]) if isinstance(leaf, torch.Tensor)
        ]
        constants = tuple(
            (position, leaf) for position, leaf in enumerate(leaves[0]) if position not in positions
        )
        for position, value in constants:
            if not isinstance(value, PLAIN_TYPES):
                raise NoSignature(
                    f"an argument of the model is a {type(value).__name__}, which is neither a"
                    " tensor nor a plain value"
                )
            if any(
                type(row[position]) is not type(value) or row[position] != value for row in leaves
            ):
                raise NoSignature(
                    f"an argument of the model that is no tensor differs between calls ({value!r})"
                )
        if not positions:
            raise NoSignature("the model gets no tensor")
        inputs = tuple(
            _common_input([row[position] for row in leaves], [call.rows for call in calls])
            for position in positions
        )
        with torch.inference_mode():
            results, spec = pytree.tree_flatten(model(*calls[0].args, **calls[0].kwargs))
        if not results or not all(isinstance(result, torch.Tensor) for result in results):
            raise NoSignature("the model's result holds other things than tensors")
        return cls(specs.pop(), constants, inputs, _dump_spec(spec), len(results))

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Signature:
        """Read the result of `as_json`."""
        inputs = tuple(
            TensorInput(input["dtype"], tuple(input["shape"]), tuple(input["rows"]))
            for input in fields["inputs"]
        )
        constants = tuple((position, value) for position, value in fields["constants"])
        for spec in (fields["arguments_spec"], fields["result_spec"]):
            _load_spec(spec)  # Checks the structure now, rather than at each request.
        return cls(
            fields["arguments_spec"],
            constants,
            inputs,
            fields["result_spec"],
            fields["outputs"],
            tuple(fields.get("requests", ())),
        )

    def as_json(self) -> dict[str, Any]:
        """Return JSON for `from_json`."""
        return {**self._asdict(), "inputs": [input._asdict() for input in self.inputs]}

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Return the free sizes as `dynamic_shapes` for the export of a FlatModel.

        All batch dimensions share one size.
        """
        batch = torch.export.Dim("batch", min=1, max=MAX_EXPORTED_BATCH)
        return tuple(
            {
                dimension: batch if dimension in input.rows else torch.export.Dim.DYNAMIC
                for dimension, size in enumerate(input.shape)
                if size is FREE
            }
            for input in self.inputs
        )

    def tensors(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor] | None:
        """Return the tensors among these arguments; None if the call has another signature."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            tensors, has_same_structure = (
                [args[0]],
                self.arguments_spec == _ONE_ARGUMENT and not self.constants,
            )
        else:
            leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
            constants = tuple(
                (position, leaf)
                for position, leaf in enumerate(leaves)
                if not isinstance(leaf, torch.Tensor)
            )
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            has_same_structure = constants == self.constants and spec == _load_spec(
                self.arguments_spec
            )
        return (
            tensors
            if has_same_structure
            and len(tensors) == len(self.inputs)
            and all(map(_fits, tensors, self.inputs))
            else None
        )

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) of the model with these tensors in them."""
        values, constants, remaining = [], dict(self.constants), iter(tensors)
        for position in range(len(constants) + len(self.inputs)):
            values.append(constants[position] if position in constants else next(remaining))
        args, kwargs = pytree.tree_unflatten(values, _load_spec(self.arguments_spec))
        return args, kwargs

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Build the result of the original model from the tensors that a graph returns."""
        if self.result_spec == _ONE_RESULT:
            return tensors[0]
        return pytree.tree_unflatten(list(tensors), _load_spec(self.result_spec))


class FlatModel(nn.Module):
    """A module that calls a model with flat tensors, and returns a tuple of tensors.

    Graphs are exported from this module.
    """

    def __init__(self, model: Any, signature: Signature) -> None:
        super().__init__()
        # `self.eval()` would fail, since an exported program does not allow eval().
        self.training = False
        self.model = model
        self.signature = signature

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.signature.arguments(tensors)
        return tuple(pytree.tree_leaves(self.model(*args, **kwargs)))


def _dump_spec(spec: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError as error:
        raise NoSignature(
            f"the model's arguments or result hold a structure that torch does not know: {error}"
        ) from error


@functools.cache
def _load_spec(spec: str) -> pytree.TreeSpec:
    """Parse the text of a structure.

    torch knows a result class, such as those of Hugging Face, only after its module was imported.
    Loading the model would import it, but a graph runs without the model. Therefore the modules of
    unknown classes are imported here.

    Raises:
        NotImplementedError: A class is unknown.
    """
    with suppress(NotImplementedError):
        return pytree.treespec_loads(spec)
    for module in re.findall(r'"type": "([\w.]+)\.\w+"', spec):
        with suppress(ImportError):
            importlib.import_module(module)
    return pytree.treespec_loads(spec)


def _common_input(tensors: Sequence[Any], rows: Sequence[int]) -> TensorInput:
    """Return the description that fits an argument in all calls.

    Raises:
        NoSignature: The tensors of the calls differ in type or in dimensions.
    """
    first = tensors[0]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise NoSignature("an argument of the model is a tensor in some calls, and none in others")
    if any(tensor.dtype != first.dtype or tensor.dim() != first.dim() for tensor in tensors):
        raise NoSignature(
            "a tensor that the model gets differs in its type or its number of dimensions between"
            " calls"
        )
    sizes = list(zip(*(tensor.shape for tensor in tensors), strict=True))
    batch_sizes_differ = len(set(rows)) > 1
    batch_dimensions = tuple(
        dimension
        for dimension, size in enumerate(sizes)
        if batch_sizes_differ and list(size) == list(rows)
    )
    return TensorInput(
        str(first.dtype).removeprefix("torch."),
        tuple(size[0] if len(set(size)) == 1 else FREE for size in sizes),
        batch_dimensions,
    )


def _fits(tensor: torch.Tensor, input: TensorInput) -> bool:
    """Tell whether a graph can take the tensor: without gradients, and not empty."""
    return (
        str(tensor.dtype)[6:] == input.dtype
        and tensor.dim() == len(input.shape)
        and all(
            actual > 0 if size is FREE else size == actual
            for size, actual in zip(input.shape, tensor.shape, strict=True)
        )
        and not tensor.requires_grad
    )


_ONE_ARGUMENT = _dump_spec(pytree.tree_flatten(((0,), {}))[1])
_ONE_RESULT = _dump_spec(pytree.tree_flatten(0)[1])
