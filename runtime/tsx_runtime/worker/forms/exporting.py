"""The export of a model as a program of flat tensors with free sizes.

Compilers and converters of several kinds of form start from such a program.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tsx_runtime.worker.forms.form import NotBuilt, Subject
from tsx_runtime.worker.forms.signature import FREE, FlatModel, Signature, TensorInput
from tsx_runtime.worker.handlers.models.model_files import FixedBatch


class SizeRange(NamedTuple):
    """The range of a size that is equal for several inputs within each call.

    Attributes:
        places: Pairs of an input's number and its dimension.
        least: The smallest size.
        most: The largest size, or None if there is no limit.
    """

    places: tuple[tuple[int, int], ...]
    least: int
    most: int | None

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tell whether this size is equal for all these tensors, and within the range."""
        sizes = {tensors[number].shape[dimension] for number, dimension in self.places}
        return len(sizes) == 1 and all(
            self.least <= size and (self.most is None or size <= self.most) for size in sizes
        )


def check_eager(model: Any) -> str | None:
    """Explain why the layers of a model cannot be changed; None if they can."""
    kind = f"a {type(model).__name__}"
    if isinstance(model, torch.fx.GraphModule | FixedBatch):
        kind = "an exported program"
    elif isinstance(model, torch.jit.ScriptModule):
        kind = "TorchScript"
    elif isinstance(model, nn.Module):
        return None
    return (
        f"the model is {kind}, whose layers cannot be changed: for this form, pack the eager model,"
        " its class and its weights"
    )


def check_exportable(subject: Subject) -> str | None:
    """Explain why `export_flat` cannot export this model; None if an attempt may succeed.

    Forms call this in `applies`.
    """
    model = subject.model
    if isinstance(model, torch.jit.ScriptModule):
        return (
            "the model is TorchScript, which torch.export does not take: pack its class and its"
            " weights, or an exported program"
        )
    if not isinstance(model, nn.Module | FixedBatch):
        return (
            f"the model is a {type(model).__name__}, which torch.export does not take: it takes an"
            " nn.Module"
        )
    return subject.no_signature or None


def get_module(model: Any) -> nn.Module:
    """Return the module to export.

    From a program that was exported for one batch size, the checks of that size are removed. Often
    nothing else in its graph depends on the size.
    """
    if not isinstance(model, FixedBatch):
        assert isinstance(model, nn.Module)
        return model
    graph = copy.deepcopy(model.model.graph)
    for node in graph.find_nodes(op="call_module", target="_guards_fn"):
        graph.erase_node(node)
    return torch.fx.GraphModule(model.model, graph)


def check_convertible(subject: Subject) -> str | None:
    """Check as `check_exportable` does, for converters that also take a trace of TorchScript."""
    return (
        subject.no_signature or None
        if isinstance(subject.model, torch.jit.ScriptModule)
        else check_exportable(subject)
    )


def flat_calls(subject: Subject) -> list[tuple[torch.Tensor, ...]]:
    """Return the flat tensors of each call."""
    signature = subject.flat_signature()
    calls = (signature.tensors(call.args, call.kwargs) for call in subject.calls)
    return [
        tuple(tensor.contiguous() for tensor in tensors) for tensors in calls if tensors is not None
    ]


def example_tensors(subject: Subject) -> tuple[torch.Tensor, ...]:
    """Return the flat tensors of the call whose smallest free size is largest.

    A size of 0 or 1 would become a constant in torch.export.
    """
    free_dimensions = [
        (number, dimension)
        for number, input in enumerate(subject.flat_signature().inputs)
        for dimension in _free_dimensions(input)
    ]
    return max(
        flat_calls(subject),
        key=lambda tensors: min(
            (tensors[number].shape[dimension] for number, dimension in free_dimensions), default=0
        ),
    )


def trace_flat(subject: Subject, model: Any = None) -> Any:
    """Return the subject's model, or another one with its signature, as TorchScript.

    The result takes flat tensors. If the model is TorchScript already, its control flow is kept.
    """
    flat = FlatModel(subject.model if model is None else model, subject.flat_signature())
    return torch.jit.trace(flat, example_tensors(subject), check_trace=False)  # type: ignore[no-untyped-call]  # torch's


def export_flat(subject: Subject, model: Any = None) -> torch.export.ExportedProgram:
    """Export the subject's model, or another one with its signature, as a program of flat tensors.

    Raises:
        NotBuilt: The model cannot be exported.
        Exception: torch fails to export it.
    """
    if reason := check_exportable(subject):
        raise NotBuilt(reason)
    # The import takes a second, and workers import this module.
    from torch._dynamo.exc import UserError

    signature, tensors = subject.flat_signature(), example_tensors(subject)
    flat = FlatModel(get_module(subject.model) if model is None else model, signature)
    with torch.no_grad():
        try:
            program = torch.export.export(
                flat, tensors, dynamic_shapes=(signature.dynamic_shapes(),), strict=False
            )
        # Some sizes depend on each other. With Dim.AUTO, torch finds out which ones.
        except UserError:
            shapes = tuple(
                dict.fromkeys(_free_dimensions(input), torch.export.Dim.AUTO)
                for input in signature.inputs
            )
            program = torch.export.export(flat, tensors, dynamic_shapes=(shapes,), strict=False)
    _check_no_constant_size(program, signature)
    return program


def size_ranges(program: torch.export.ExportedProgram, signature: Signature) -> list[SizeRange]:
    """Return the ranges of the free sizes of an exported program.

    Raises:
        NotBuilt: A size depends on another one.
    """
    # sympy takes half a second to import.
    from torch.utils._sympy.value_ranges import bound_sympy

    places_by_size: dict[Any, list[tuple[int, int]]] = {}
    for number, dimension, size in _iterate_free_sizes(program, signature):
        places_by_size.setdefault(size.node.expr, []).append((number, dimension))
    ranges = []
    for size, positions in places_by_size.items():
        if not size.is_Symbol:
            raise NotBuilt(
                f"a size of its inputs is calculated from another one ({size}), which compiled code"
                " does not check"
            )
        limits = bound_sympy(size, program.range_constraints)
        least, most = (
            None if math.isinf(limit) else int(limit) for limit in (limits.lower, limits.upper)
        )
        # torch gives the lower limit 2 for sizes that may also be 1.
        ranges.append(
            SizeRange(tuple(positions), 1 if least is None or least <= 2 else least, most)
        )
    return ranges


def _free_dimensions(input: TensorInput) -> list[int]:
    return [dimension for dimension, size in enumerate(input.shape) if size is FREE]


def _check_no_constant_size(program: torch.export.ExportedProgram, signature: Signature) -> None:
    # sympy takes half a second to import.
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    for number, dimension, size in _iterate_free_sizes(program, signature):
        if is_concrete_int(size):
            is_batch = dimension in signature.inputs[number].rows
            size_text = (
                f"batches of {size}"
                if is_batch
                else f"tensors of size {size} in dimension {dimension}"
            )
            raise NotBuilt(
                f"as an exported program it takes only {size_text}, since its code makes that size"
                " a constant"
            )


def _iterate_free_sizes(
    program: torch.export.ExportedProgram, signature: Signature
) -> Iterator[tuple[int, int, Any]]:
    """Yield the input's number, the dimension and the program's size of each free size."""
    nodes = {node.name: node for node in program.graph.nodes}
    for number, name in enumerate(program.graph_signature.user_inputs):
        for dimension in _free_dimensions(signature.inputs[number]):
            yield number, dimension, nodes[name].meta["val"].shape[dimension]
