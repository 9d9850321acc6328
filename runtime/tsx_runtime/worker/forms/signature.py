"""How a handler calls its model: with which tensors of which shapes, and the structure of the
result.

A graph (ONNX, OpenVINO, AOTInductor, ...) takes and returns a flat list of tensors. A signature is
found from real calls. It takes the tensors out of the arguments, and builds the result that the
original model would have returned.
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
from torch.utils import (
    _pytree as pytree,
)  # torch.export itself flattens arguments and results by it

LARGEST_BATCH = 4096
FREE = None  # in a shape: a size that differs between calls
PLAIN = (
    bool,
    int,
    float,
    str,
    type(None),
)  # arguments that are part of the signature by their value


class NoSignature(ValueError):
    """Why calls have no signature in common, in words."""


class ModelCall(NamedTuple):
    """One call of the model by its handler, for a batch of `rows` requests."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int


class TensorInput(NamedTuple):
    """A tensor among the arguments.

    Sizes in `shape` are None where they differ between calls; `rows` are the dimensions of the
    batch.
    """

    dtype: str  # float32
    shape: tuple[int | None, ...]
    rows: tuple[int, ...]


class Signature(NamedTuple):
    arguments_spec: str  # of (args, kwargs), as torch's pytree writes it
    constants: tuple[
        tuple[int, Any], ...
    ]  # (position among the leaves, value) of arguments that are no tensor
    inputs: tuple[TensorInput, ...]
    result_spec: str
    outputs: int  # tensors in the result
    requests: tuple[
        Mapping[str, Any], ...
    ] = ()  # what BaseHandler reads in a request for the model: `InputSpec.as_json`

    @classmethod
    def of(cls, model: Any, calls: Sequence[ModelCall]) -> Signature:
        """`model` is called once, for its result. Raises NoSignature."""
        if not calls:
            raise NoSignature("its handler did not call self.model")
        flat = [pytree.tree_flatten((call.args, dict(call.kwargs))) for call in calls]
        specs = {_dumped(spec) for _, spec in flat}
        if len(specs) > 1:
            raise NoSignature("its handler calls the model with arguments of different structure")
        leaves = [leaves for leaves, _ in flat]
        positions = [at for at, leaf in enumerate(leaves[0]) if isinstance(leaf, torch.Tensor)]
        constants = tuple((at, leaf) for at, leaf in enumerate(leaves[0]) if at not in positions)
        for at, value in constants:
            if not isinstance(value, PLAIN):
                raise NoSignature(
                    f"an argument of the model is a {type(value).__name__}, which is neither a"
                    " tensor nor a plain value"
                )
            if any(type(each[at]) is not type(value) or each[at] != value for each in leaves):
                raise NoSignature(
                    f"an argument of the model that is no tensor differs between calls ({value!r})"
                )
        if not positions:
            raise NoSignature("the model gets no tensor")
        inputs = tuple(
            _input([each[at] for each in leaves], [call.rows for call in calls]) for at in positions
        )
        with torch.inference_mode():
            results, spec = pytree.tree_flatten(model(*calls[0].args, **calls[0].kwargs))
        if not results or not all(isinstance(each, torch.Tensor) for each in results):
            raise NoSignature("the model's result holds other things than tensors")
        return cls(specs.pop(), constants, inputs, _dumped(spec), len(results))

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Signature:
        inputs = tuple(
            TensorInput(each["dtype"], tuple(each["shape"]), tuple(each["rows"]))
            for each in given["inputs"]
        )
        constants = tuple((at, value) for at, value in given["constants"])
        for spec in (given["arguments_spec"], given["result_spec"]):
            _loaded(spec)  # a structure that is not known here fails the load, not each request
        return cls(
            given["arguments_spec"],
            constants,
            inputs,
            given["result_spec"],
            given["outputs"],
            tuple(given.get("requests", ())),
        )

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {**self._asdict(), "inputs": [each._asdict() for each in self.inputs]}

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """The free sizes for `torch.export.export(FlatModel(...), tensors,
        dynamic_shapes=(these,))`; the batch is one dimension.
        """
        batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
        return tuple(
            {
                at: batch if at in each.rows else torch.export.Dim.DYNAMIC
                for at, size in enumerate(each.shape)
                if size is FREE
            }
            for each in self.inputs
        )

    def tensors(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor] | None:
        """The tensors among these arguments; None where the call has another signature."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            found, same = [args[0]], self.arguments_spec == _ONE_ARGUMENT and not self.constants
        else:
            leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
            constants = tuple(
                (at, leaf) for at, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)
            )
            found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            same = constants == self.constants and spec == _loaded(self.arguments_spec)
        return (
            found
            if same and len(found) == len(self.inputs) and all(map(_fits, found, self.inputs))
            else None
        )

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the model with these tensors in them."""
        values, constants, given = [], dict(self.constants), iter(tensors)
        for at in range(len(constants) + len(self.inputs)):
            values.append(constants[at] if at in constants else next(given))
        args, kwargs = pytree.tree_unflatten(values, _loaded(self.arguments_spec))
        return args, kwargs

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result of the original model, built from the tensors that a graph returns."""
        if self.result_spec == _ONE_RESULT:
            return tensors[0]
        return pytree.tree_unflatten(list(tensors), _loaded(self.result_spec))


class FlatModel(nn.Module):
    """The model as a function of flat tensors that returns a tuple of tensors.

    Graphs are exported from it.
    """

    def __init__(self, model: Any, signature: Signature) -> None:
        super().__init__()
        self.training = False  # eval() would call that of an exported program, which raises
        self.model = model
        self.signature = signature

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.signature.arguments(tensors)
        return tuple(pytree.tree_leaves(self.model(*args, **kwargs)))


def _dumped(spec: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError as error:
        raise NoSignature(
            f"the model's arguments or result hold a structure that torch does not know: {error}"
        ) from error


@functools.cache
def _loaded(spec: str) -> pytree.TreeSpec:
    """Torch knows classes of results, such as those of Hugging Face, once their module is imported.
    Loading the model does that, which a graph does without. Raises NotImplementedError for a class
    that is not known.
    """
    with suppress(NotImplementedError):
        return pytree.treespec_loads(spec)
    for module in re.findall(r'"type": "([\w.]+)\.\w+"', spec):
        with suppress(ImportError):
            importlib.import_module(module)
    return pytree.treespec_loads(spec)


def _input(tensors: Sequence[Any], rows: Sequence[int]) -> TensorInput:
    """Raises NoSignature."""
    first = tensors[0]
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        raise NoSignature("an argument of the model is a tensor in some calls, and none in others")
    if any(each.dtype != first.dtype or each.dim() != first.dim() for each in tensors):
        raise NoSignature(
            "a tensor that the model gets differs in its type or its number of dimensions between"
            " calls"
        )
    sizes = list(zip(*(each.shape for each in tensors), strict=True))
    differing = len(set(rows)) > 1
    batch = tuple(at for at, found in enumerate(sizes) if differing and list(found) == list(rows))
    return TensorInput(
        str(first.dtype).removeprefix("torch."),
        tuple(found[0] if len(set(found)) == 1 else FREE for found in sizes),
        batch,
    )


def _fits(tensor: torch.Tensor, input: TensorInput) -> bool:
    """A graph has no gradients, and may not be made for no rows."""
    return (
        str(tensor.dtype)[6:] == input.dtype
        and tensor.dim() == len(input.shape)
        and all(
            size > 0 if own is FREE else own == size
            for own, size in zip(input.shape, tensor.shape, strict=True)
        )
        and not tensor.requires_grad
    )


_ONE_ARGUMENT = _dumped(pytree.tree_flatten(((0,), {}))[1])
_ONE_RESULT = _dumped(pytree.tree_flatten(0)[1])
