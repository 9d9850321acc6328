"""Make image_references.npz with torchvision itself, whose Pillow transforms need none of its
compiled parts.

    pip download --no-deps torchvision && unzip torchvision-*.whl 'torchvision/*.py'
    python tests/runtime/worker/handlers/steps/make_image_references.py .

Of each tensor of image_samples.py it keeps every 16th pixel, and the sum over each channel.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
from image_samples import SIZES, sample


def torchvision_transforms(directory: str) -> types.ModuleType:
    """`torchvision.transforms`, without running the package's `__init__`, which wants its compiled
    operators.
    """
    package = types.ModuleType("torchvision")
    package.__path__ = [f"{directory}/torchvision"]
    extension = types.ModuleType("torchvision.extension")
    extension._HAS_OPS = False
    sys.modules.update({"torchvision": package, "torchvision.extension": extension})
    from torchvision.transforms import transforms

    return transforms


def main(directory: str) -> None:
    transforms = torchvision_transforms(directory)
    pipeline = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    kept = {}
    for width, height in SIZES:
        tensor = pipeline(sample(width, height))
        kept[f"pixels-{width}x{height}"] = tensor[:, ::16, ::16].numpy()
        kept[f"sums-{width}x{height}"] = tensor.double().sum(dim=(1, 2)).numpy()
    np.savez_compressed(Path(__file__).with_name("image_references.npz"), **kept)


if __name__ == "__main__":
    main(sys.argv[1])
