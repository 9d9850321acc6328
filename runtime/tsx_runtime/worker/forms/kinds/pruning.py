"""Structured pruning: the model without the channels and hidden units of smallest weights.

Layers become smaller instead of getting zeros, and are compiled ahead of time. There is no
retraining, so the loss is often large.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tsx_runtime.worker.forms.exporting import export_flat, not_eager
from tsx_runtime.worker.forms.form import NotBuilt, Subject
from tsx_runtime.worker.forms.machine_code import MachineCodeForm, for_inductor

CHANNEL_MULTIPLE = 8  # Layers keep a multiple of it, for vector instructions.
# The library's names of operations that give channels another meaning.
REGROUPING = re.compile(
    r"_Split|_Unbind|_Slice|_Expand|_Customized|Permute|Transpose|ScaledDotProduct|Bmm"
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PrunedForm(MachineCodeForm):
    share: float = 0.0  # the share of each layer's channels to remove

    tools: ClassVar[tuple[str, ...]] = ("torch_pruning",)

    def applies(self, subject: Subject) -> str | None:
        if reason := not_eager(subject.model):
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
        if not _prune(model, subject, self.share):
            raise NotBuilt(
                "none of its layers has channels or hidden units that only the next layers use"
            )
        try:
            shapes = [leaf.shape for leaf in tree_leaves(model(*call.args, **call.kwargs))]
        except RuntimeError as error:
            raise NotBuilt(f"its code holds the sizes of layers as constants: {error}") from error
        if shapes != expected:
            raise NotBuilt("its result holds the channels of an inner layer")
        return export_flat(subject, for_inductor(model))


def _prune(model: nn.Module, subject: Subject, share: float) -> int:
    """Prune the model, and return the number of pruned groups of coupled layers."""
    import torch_pruning

    call, pruned = subject.calls[0], 0
    model.requires_grad_(True)
    # The library finds by autograd which layers depend on each other.
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
        first = group[0].dep
        channels = graph.get_out_channels(first.target.module)
        removed = (
            channels - -(-round(channels * (1 - share)) // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE
        )
        if removed <= 0 or not _prunable(graph, group):
            continue
        weakest = importance(group).argsort()[:removed].tolist()
        smaller = graph.get_pruning_group(first.target.module, first.handler, weakest)
        if graph.check_pruning_group(smaller):
            smaller.prune()
            pruned += 1
    model.requires_grad_(False)
    return pruned


def _prunable(graph: Any, group: Any) -> bool:
    """Tell whether another layer takes these channels, and no operation regroups them.

    Attention regroups channels by its heads.
    """
    layers = [(dep.target.module, graph.is_out_channel_pruning_fn(dep.handler)) for dep, _ in group]
    layers = [
        (layer, out) for layer, out in layers if isinstance(layer, (*CONVOLUTIONS, nn.Linear))
    ]
    makers = {layer for layer, out in layers if out}
    if len(makers) > 1 and any(isinstance(layer, nn.Linear) for layer in makers):
        # The channels are a sum of several layers, such as between the blocks of a transformer.
        return False
    if any(
        getattr(layer, "groups", 1) not in (1, getattr(layer, "in_channels", 1)) for layer in makers
    ):
        return False
    return any(not out for _, out in layers) and not any(
        REGROUPING.search(dep.target.name) for dep, _ in group
    )


FORMS = (
    PrunedForm("pruned-25", "a quarter pruned", 0.25),
    PrunedForm("pruned-50", "half pruned", 0.5),
)
