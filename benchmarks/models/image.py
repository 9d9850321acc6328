"""A small convolutional network on one thread, for JPEG images, which it decodes."""

import io

import numpy as np
import torch
from PIL import Image

SIDE = 64
model = None


def start():
    global model
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, channels = [], 3
    for width in (16, 32, 64):
        layers += [torch.nn.Conv2d(channels, width, 3, stride=2, padding=1), torch.nn.ReLU()]
        channels = width
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 10)
    ).eval()


def sample():
    thumbnail = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    )
    file = io.BytesIO()
    thumbnail.resize((160, 160), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def pixels(body):
    return np.asarray(
        Image.open(io.BytesIO(body)).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    )


def answers(bodies):
    rows = (
        torch.from_numpy(np.stack([pixels(body) for body in bodies])).permute(0, 3, 1, 2).float()
        / 255
    )
    with torch.inference_mode():
        return model(rows).softmax(1).tolist()


def handle(data, context):
    if data is None:
        return start()
    return answers([row["body"] for row in data])
