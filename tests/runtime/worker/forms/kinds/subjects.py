"""Small models that forms are built from, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Tied(nn.Module):
    """Two names for one weight, and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 96)
        self.out = nn.Linear(96, 64, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(96), persistent=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.out((self.embed(ids) * mask.unsqueeze(-1)).mean(1) + self.offset)}


def tied() -> nn.Module:
    return Tied().eval()


def texts(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    length = 4 + rows % 3
    return (torch.arange(rows * length).view(rows, length) % 64,), {
        "mask": torch.ones(rows, length)
    }


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(392, 4)
    ).eval()
