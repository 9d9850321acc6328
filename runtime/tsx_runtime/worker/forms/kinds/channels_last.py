"""The archive's own model with its weights and images in the channels-last memory format, in which
convolutions are faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tsx_runtime.worker.forms.exporting import not_eager
from tsx_runtime.worker.forms.form import Form, FormSource, Subject


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


class ChannelsLastForm(Form):
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    bound_to: ClassVar[frozenset[str]] = frozenset()
    is_graph: ClassVar[bool] = False

    def applies(self, subject: Subject) -> str | None:
        reason = not_eager(subject.model)
        return reason or (
            None if has_convolutions(subject.model) else "the model has no 2D convolution"
        )

    def build(self, subject: Subject, directory: Path) -> Mapping[str, Any]:
        return {}

    def load(self, source: FormSource) -> Any:
        """The first convolution converts the images; later layers keep the format."""
        return source.fresh().to(memory_format=torch.channels_last)


FORMS = (ChannelsLastForm("channels-last", "channels last"),)
