"""The handler of the detector: it converts a drawing to a tensor, and output to symbols."""

from typing import Any

import numpy as np
import torch
from decoding import THRESHOLD, decode
from PIL import Image
from ts.torch_handler.object_detector import ObjectDetector

SIZE = 384  # pixels of the network's input


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Convert a drawing to a tensor.

    Args:
        image: Dark ink on light paper, of any size and mode.

    Returns:
        float32 of shape (1, 384, 384), ink 1 and paper 0.
    """
    grey = image.convert("L")
    if grey.size != (SIZE, SIZE):
        grey = grey.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return 1 - torch.from_numpy(np.array(grey, dtype=np.float32)).unsqueeze(0) / 255


class SymbolDetector(ObjectDetector):
    """A detector that inherits the reading and batching of requests, and the names of classes."""

    threshold = THRESHOLD
    image_processing = staticmethod(to_tensor)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return decode(super().inference(data, *args, **kwargs))

    def postprocess(self, data: Any) -> list[Any]:
        """Sort the symbols by name, then along a slanted line.

        Neither scores nor symbols in one row change that order.
        """
        return [sorted(symbols, key=_sort_key) for symbols in super().postprocess(data)]


def _sort_key(symbol: dict[str, Any]) -> tuple[str, float]:
    name = next(iter(symbol))
    left, top, right, bottom = symbol[name]
    return name, left + right + 0.618 * (top + bottom)
