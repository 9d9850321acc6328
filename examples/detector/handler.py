"""From the bytes of a drawing to the symbols in it: what runs in a worker, for every request."""

from typing import Any

import numpy as np
import torch
from decoding import THRESHOLD, decode
from PIL import Image
from ts.torch_handler.object_detector import ObjectDetector

SIZE = 384  # what the network looks at, whatever the size of the drawing


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Dark ink on light paper, any size and mode -> float32 of shape (1, 384, 384), ink 1 and paper
    0.
    """
    grey = image.convert("L")
    if grey.size != (SIZE, SIZE):
        grey = grey.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return 1 - torch.from_numpy(np.array(grey, dtype=np.float32)).unsqueeze(0) / 255


class SymbolDetector(ObjectDetector):
    """Inherits the rest: reading the requests, batching them, the names in `index_to_name.json`."""

    threshold = THRESHOLD
    image_processing = staticmethod(to_tensor)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return decode(super().inference(data, *args, **kwargs))

    def postprocess(self, data: Any) -> list[Any]:
        """By name, and along a slant among those of one name, so that neither a score nor two
        symbols in one line change the order.
        """
        return [sorted(things, key=_place) for things in super().postprocess(data)]


def _place(thing: dict[str, Any]) -> tuple[str, float]:
    name = next(iter(thing))
    left, top, right, bottom = thing[name]
    return name, left + right + 0.618 * (top + bottom)
