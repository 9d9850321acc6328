"""From the bytes of a picture to the names of the likeliest digits: what runs in a worker, for
every request.
"""

import numpy as np
import torch
from PIL import Image
from ts.torch_handler.image_classifier import ImageClassifier


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Light ink on a dark ground, any size -> float32 of shape (1, 8, 8) in 0..1."""
    grey = image.convert("L")
    if grey.size != (8, 8):
        grey = grey.resize((8, 8), Image.Resampling.BOX)
    return torch.from_numpy(np.array(grey, dtype=np.float32) / 255).unsqueeze(0)


class DigitClassifier(ImageClassifier):
    """Inherits the rest: reading the requests, batching them, softmax, the names in
    `index_to_name.json`.
    """

    topk = 3
    image_processing = staticmethod(to_tensor)
