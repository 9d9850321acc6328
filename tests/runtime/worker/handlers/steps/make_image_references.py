"""Makes image_references.npz with torchvision's Python files, without its compiled operators.

    pip download --no-deps torchvision && unzip torchvision-*.whl 'torchvision/*.py'
    python tests/runtime/worker/handlers/steps/make_image_references.py .

The file has every 16th pixel of the tensor of each image in image_samples.py, and channel sums.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
from image_samples import SIZES, sample


def torchvision_transforms(directory: str) -> types.ModuleType:
    """Import `torchvision.transforms` without the package's compiled operators."""
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
    arrays = {}
    for width, height in SIZES:
        tensor = pipeline(sample(width, height))
        arrays[f"pixels-{width}x{height}"] = tensor[:, ::16, ::16].numpy()
        arrays[f"sums-{width}x{height}"] = tensor.double().sum(dim=(1, 2)).numpy()
    np.savez_compressed(Path(__file__).with_name("image_references.npz"), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
