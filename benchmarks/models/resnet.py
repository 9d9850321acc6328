"""A network of the shape of ResNet-18 on raw pixels, 3 x 224 x 224 bytes, with random weights; its handler does nothing but run it."""

import torch
from torch import nn

from tsx_runtime.worker.handlers.base import BaseHandler

SHAPE = (3, 224, 224)


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        is_same = stride == 1 and before == after
        self.short = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
            layers += [Block(before, after, 1 if after == 64 else 2), Block(after, after, 1)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))

    def forward(self, pixels):
        return self.layers(pixels.float() / 255)


class Handler(BaseHandler):
    def initialize(self, context):
        self.context, self.device = context, torch.device("cpu")
        self.model = self.in_form(lambda: ResNet().eval())
        self.initialized = True

    def preprocess(self, data):
        return torch.frombuffer(bytearray().join(row["body"] for row in data), dtype=torch.uint8).view(-1, *SHAPE)

    def postprocess(self, data):
        return data.argmax(1).tolist()
