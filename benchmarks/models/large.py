"""A model of 500 MB that reads all its weights for each answer."""

import torch


class Large(torch.nn.Module):
    """A model of (batch, 1) that returns the input times the mean of all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(125_000, 1_000))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return scale * self.weight.mean()
