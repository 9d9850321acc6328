"""A layer of the text classifier in bert.py, with attention, two linear layers and norms."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS = 384, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, _ = features.shape
        query, key, value = (
            self.attention(features)
            .view(batch, length, 3, HEADS, WIDTH // HEADS)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attended = (
            functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            .transpose(1, 2)
            .reshape(batch, length, WIDTH)
        )
        features = self.first_norm(features + self.out(attended))
        result: torch.Tensor = self.second_norm(
            features + self.down(functional.gelu(self.up(features)))
        )
        return result
