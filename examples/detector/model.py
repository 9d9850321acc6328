"""The network: a small convolutional detector with about 180,000 weights."""

import torch
from torch import nn

CLASSES = 8
STRIDE = 8


def convolution(
    inputs: int, outputs: int, norm: bool, stride: int = 1, dilation: int = 1
) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation)
    return (
        nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())
        if norm
        else nn.Sequential(layer, nn.ReLU())
    )


class Detector(nn.Module):
    """A detector with one output cell for 8 x 8 pixels.

    It takes float32 of shape (batch, 1, height, width), ink 1 and paper 0, with sides that are
    multiples of 8. It returns (batch, CLASSES + 4, height / 8, width / 8): for each cell `CLASSES`
    logits of a symbol's centre, and the distances from the cell's centre to the left, top, right
    and bottom of the box, in cells. It is trained with `norm`, and served with the norms folded
    into the convolutions.
    """

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(1, 16, norm, stride=2),
            convolution(16, 16, norm),
            convolution(16, 32, norm, stride=2),
            convolution(32, 32, norm),
            convolution(32, 48, norm, stride=2),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(convolution(48, 48, norm, dilation=reach), convolution(48, 48, norm))
            for reach in (2, 3, 1)
        )
        self.head = nn.Sequential(convolution(48, 64, norm), nn.Conv2d(64, CLASSES + 4, 1))

    def forward(self, drawings: torch.Tensor) -> torch.Tensor:
        features = self.stem(drawings)
        for block in self.blocks:
            features = features + block(features)
        maps: torch.Tensor = self.head(features)
        return maps
