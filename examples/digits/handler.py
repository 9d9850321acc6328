"""The handler of the digits: it converts an image to a tensor, and logits to names of digits."""

import numpy as np
import torch
from PIL import Image
from ts.torch_handler.image_classifier import ImageClassifier


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Convert an image to a tensor.

    Args:
        image: Light ink on a dark ground, of any size.

    Returns:
        float32 of shape (1, 8, 8), in the range 0..1.
    """
    grey = image.convert("L")
    if grey.size != (8, 8):
        grey = grey.resize((8, 8), Image.Resampling.BOX)
    return torch.from_numpy(np.array(grey, dtype=np.float32) / 255).unsqueeze(0)


class DigitClassifier(ImageClassifier):
    """A classifier that inherits everything but the image's conversion.

    ImageClassifier reads and batches the requests, applies softmax, and names the classes by
    `index_to_name.json`.
    """

    topk = 3
    image_processing = staticmethod(to_tensor)
