"""Computed images, equal on every machine, in sizes that cover each rounding rule."""

from __future__ import annotations

import numpy as np
from PIL import Image

SIZES = [
    (500, 375),
    (375, 500),
    (256, 256),
    (224, 224),
    (257, 256),
    (640, 427),
    (333, 251),
    (61, 97),
    (1000, 90),
    (1, 1),
    (3, 200),
    (1281, 719),
]


def sample(width: int, height: int, mode: str = "RGB") -> Image.Image:
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    channels = [(x * 7 + y * 3) % 256, (x * x // 5 + y * 11) % 256, (x * y // 3 + 40) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8), "RGB").convert(mode)
