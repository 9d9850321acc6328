"""Structured pruning, which removes the channels and hidden units with the smallest weights.

Layers become smaller, rather than sparse, and are compiled ahead of time. The model is not trained
again, so its results often get much worse.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tsx_runtime.worker.forms.exporting import check_eager, export_flat
from tsx_runtime.worker.forms.form import NotBuilt, Subject
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, prepare_for_inductor

CHANNEL_MULTIPLE = 8  # Each layer keeps a multiple of this, for vector instructions.
# torch_pruning's names of operations that split, reorder or regroup channels.
REGROUPING = re.compile(
    r"_Split|_Unbind|_Slice|_Expand|_Customized|Permute|Transpose|ScaledDotProduct|Bmm"
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PrunedForm(MachineCodeForm):
    pruned_fraction: float = 0.0  # the fraction of each layer's channels to remove

    tools: ClassVar[tuple[str, ...]] = ("torch_pruning",)

    def applies(self, subject: Subject) -> str | None:
        if reason := check_eager(subject.model):
            return reason
        if (
            sum(isinstance(layer, (*CONVOLUTIONS, nn.Linear)) for layer in subject.model.modules())
            < 2
        ):
            return "the model has no two convolutions or linear layers in a row"
        return super().applies(subject)

    def program(self, subject: Subject) -> torch.export.ExportedProgram:
        model, call = copy.deepcopy(subject.model), subject.calls[0]
        expected = [leaf.shape for leaf in tree_leaves(subject.model(*call.args, **call.kwargs))]
        if not _prune(model, subject, self.pruned_fraction):
            raise NotBuilt(
                "none of its layers has channels or hidden units that only the next layers use"
            )
        try:
            shapes = [leaf.shape for leaf in tree_leaves(model(*call.args, **call.kwargs))]
        except RuntimeError as error:
            raise NotBuilt(f"its code holds the sizes of layers as constants: {error}") from error
        if shapes != expected:
            raise NotBuilt("its result holds the channels of an inner layer")
        return export_flat(subject, prepare_for_inductor(model))


def _prune(model: nn.Module, subject: Subject, pruned_fraction: float) -> int:
    """Prune the model, and return the number of pruned groups of coupled layers."""
    import torch_pruning

    call, pruned_groups = subject.calls[0], 0
    model.requires_grad_(True)
    # torch_pruning uses autograd to find the layers that depend on each other.
    with torch.enable_grad():
        graph = torch_pruning.DependencyGraph()
        graph.build_dependency(
            model,
            example_inputs=None,
            forward_fn=lambda model, _: model(*call.args, **call.kwargs),
            verbose=False,
        )
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
    for group in graph.get_all_groups():
        first_dependency = group[0].dep
        channels = graph.get_out_channels(first_dependency.target.module)
        removed = (
            channels
            - -(-round(channels * (1 - pruned_fraction)) // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE
        )
        if removed <= 0 or not _is_prunable(graph, group):
            continue
        weakest_channels = importance(group).argsort()[:removed].tolist()
        pruning_group = graph.get_pruning_group(
            first_dependency.target.module, first_dependency.handler, weakest_channels
        )
        if graph.check_pruning_group(pruning_group):
            pruning_group.prune()
            pruned_groups += 1
    model.requires_grad_(False)
    return pruned_groups


def _is_prunable(graph: Any, group: Any) -> bool:
    """Tell whether other layers consume these channels, and no operation regroups them.

    For example, attention regroups channels by its heads.
    """
    layers = [(dep.target.module, graph.is_out_channel_pruning_fn(dep.handler)) for dep, _ in group]
    layers = [
        (layer, is_producer)
        for layer, is_producer in layers
        if isinstance(layer, (*CONVOLUTIONS, nn.Linear))
    ]
    producers = {layer for layer, is_producer in layers if is_producer}
    if len(producers) > 1 and any(isinstance(layer, nn.Linear) for layer in producers):
        # Several layers add to the same channels, as between the blocks of a transformer.
        return False
    if any(
        getattr(layer, "groups", 1) not in (1, getattr(layer, "in_channels", 1))
        for layer in producers
    ):
        return False
    return any(not is_producer for _, is_producer in layers) and not any(
        REGROUPING.search(dep.target.name) for dep, _ in group
    )


FORMS = (
    PrunedForm("pruned-25", "a quarter pruned", 0.25),
    PrunedForm("pruned-50", "half pruned", 0.5),
)
