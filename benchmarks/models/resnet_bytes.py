"""A model of the shape of ResNet-18 with random weights, for raw pixels: 3 x 224 x 224 bytes."""

import torch
from resnet18 import ResNet18

from tsx_runtime.worker.handlers.base import BaseHandler


class ResNetOfBytes(ResNet18):
    def forward(self, pixels):
        return super().forward(pixels.float() / 255)


def model():
    torch.manual_seed(0)
    return ResNetOfBytes(classes=1000).eval()


class Handler(BaseHandler):
    def initialize(self, context):
        self.context, self.device = context, torch.device("cpu")
        self.model = self.in_form(model)
        self.initialized = True

    def preprocess(self, data):
        return torch.frombuffer(
            bytearray().join(row["body"] for row in data), dtype=torch.uint8
        ).view(-1, 3, 224, 224)

    def postprocess(self, data):
        return data.argmax(1).tolist()
