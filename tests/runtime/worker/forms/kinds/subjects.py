"""Small models from which forms are built, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.forms import tensor_inputs


class Tied(nn.Module):
    """A model with two names for one weight, and a buffer outside the state dict."""

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


def scripted() -> Any:
    return torch.jit.script(images())


class Encoder(nn.Module):
    """A layer of a transformer, with an unused argument and a structured result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.queries, self.keys, self.values = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(
        self, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        heads = (layer(x).unsqueeze(1) for layer in (self.queries, self.keys, self.values))
        mixed = nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask[:, None, None, :].bool()
        )
        hidden = self.norm(x + mixed.squeeze(1))
        return {"logits": self.head(hidden[:, 0]), "hidden": hidden}


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval()


def sentences(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return token ids; their length differs between batches."""
    ids = torch.randint(0, 50, (rows, 5 + rows % 4), generator=torch.Generator().manual_seed(rows))
    return (ids, torch.zeros_like(ids)), {"mask": torch.ones_like(ids)}


IMAGES = tensor_inputs(3, 9, 9)


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(392, 4)
    ).eval()
