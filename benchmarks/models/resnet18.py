"""A convolutional network of the shape of ResNet-18.

It takes float32 (batch, 3, height, width) and returns logits (batch, classes).
"""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

WIDTHS = (64, 64, 64, 128, 128, 256, 256, 512, 512)


def convolution(in_channels: int, out_channels: int, side: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, side, stride, side // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class ResNet18(nn.Module):
    def __init__(self, classes: int = 10, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, widths[0], 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.first, self.second, self.shortcuts = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for in_channels, out_channels in itertools.pairwise(widths):
            stride = out_channels // in_channels  # The image's sides halve when the width doubles.
            self.first.append(
                nn.Sequential(convolution(in_channels, out_channels, 3, stride), nn.ReLU())
            )
            self.second.append(convolution(out_channels, out_channels, 3, 1))
            self.shortcuts.append(
                nn.Identity() if stride == 1 else convolution(in_channels, out_channels, 1, stride)
            )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        for first, second, shortcut in zip(self.first, self.second, self.shortcuts, strict=True):
            features = torch.relu(second(first(features)) + shortcut(features))
        logits: torch.Tensor = self.head(features.mean((2, 3)))
        return logits
