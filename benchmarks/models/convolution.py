"""A convolutional network on raw pixels, on one thread; a request takes about 10 ms.

Compared with this, the front end takes little time.
"""

import numpy as np
import torch

SIDE = 128
model = None


def start():
    global model
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, channels = [], 3
    for width in (24, 48, 96):
        layers += [torch.nn.Conv2d(channels, width, 3, stride=2, padding=1), torch.nn.ReLU()]
        layers += [torch.nn.Conv2d(width, width, 3, padding=1), torch.nn.ReLU()]
        channels = width
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 10)
    ).eval()


def sample():
    return np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE), dtype=np.uint8).tobytes()


def handle(data, context):
    if data is None:
        return start()
    rows = (
        torch.frombuffer(bytearray().join(row["body"] for row in data), dtype=torch.uint8)
        .view(-1, 3, SIDE, SIDE)
        .float()
        / 255
    )
    with torch.inference_mode():
        return model(rows).softmax(1).tolist()
