"""The network: three small convolutions over an 8x8 picture, then one linear layer.

About 15,000 weights.
"""

import torch
from torch import nn


class DigitNet(nn.Module):
    """Takes float32 of shape (batch, 1, 8, 8) in 0..1 and returns logits of shape (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(images).flatten(1))
