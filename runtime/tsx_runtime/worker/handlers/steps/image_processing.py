"""Steps that prepare images for classifiers, with Pillow and torch only.

Steps, sizes and roundings are those of torchvision's Resize, CenterCrop, ToTensor and Normalize for
Pillow images. A model trained with them sees the same numbers.
https://pytorch.org/vision/stable/transforms.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB.

    Grey is repeated, and transparency is dropped. The upper 8 of 16 bits are kept, since Pillow
    alone would clip the values.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        wide = np.asarray(image.convert("I"))
        image = Image.fromarray((wide >> 8).clip(0, 255).astype(np.uint8), "L")
    return image.convert("RGB")


def resized(width: int, height: int, shorter: int) -> tuple[int, int]:
    """Return the size with a shorter side of `shorter`; the longer one is rounded down."""
    if width <= height:
        return shorter, int(shorter * height / width)
    return int(shorter * width / height), shorter


def resize(image: Image.Image, shorter: int) -> Image.Image:
    """Resize to a shorter side of `shorter`, bilinear with Pillow's antialiasing.

    Raises:
        ValueError: The result would be too large.
    """
    size = resized(*image.size, shorter)
    if size == image.size:
        return image
    # An image of 1 x 60000 pixels would fill the memory.
    if Image.MAX_IMAGE_PIXELS is not None and size[0] * size[1] > 2 * Image.MAX_IMAGE_PIXELS:
        raise ValueError(
            f"its {image.width} x {image.height} pixels would be {size[0]} x {size[1]} with the"
            f" shorter side at {shorter}"
        )
    return image.resize(size, Image.Resampling.BILINEAR)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the middle `size` x `size` pixels; a smaller image gets a black border first.

    Halves are rounded to even.
    """
    width, height = image.size
    if width < size or height < size:
        across, down = max(size - width, 0), max(size - height, 0)
        image = ImageOps.expand(image, (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2))
        width, height = image.size
    x, y = round((width - size) / 2), round((height - size) / 2)
    return image.crop((x, y, x + size, y + size))


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return float32 of shape (channels, height, width) in 0..1."""
    pixels = np.array(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)


def normalize(tensor: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Subtract a mean and divide by a deviation for each channel, in place."""
    return tensor.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(std).view(-1, 1, 1))


def imagenet(image: Image.Image) -> torch.Tensor:
    """Return the input of classifiers trained on ImageNet: float32 of shape (3, 224, 224)."""
    return normalize(
        to_tensor(center_crop(resize(to_rgb(image), 256), 224)), IMAGENET_MEAN, IMAGENET_STD
    )


Transform = Callable[[Image.Image], Any]
