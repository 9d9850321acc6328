"""The handler that returns the label, box and score of each object in an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from tsx_runtime.worker.handlers.staging import stack_on_device, to_device
from tsx_runtime.worker.handlers.steps.image_processing import to_rgb, to_tensor
from tsx_runtime.worker.handlers.steps.timing import timed
from tsx_runtime.worker.handlers.vision import VisionHandler


def unscaled(image: Image.Image) -> torch.Tensor:
    """Return float32 of shape (3, height, width) in 0..1, without changing the size."""
    return to_tensor(to_rgb(image))


class ObjectDetector(VisionHandler):
    """A handler for models with the interface of torchvision's detectors.

    The model returns `boxes`, `labels` and `scores` for each image
    (https://pytorch.org/vision/stable/models.html#object-detection).

    Attributes:
        threshold: The lowest score of an object in a response.
        image_processing: Converts a Pillow image to float32 of shape (3, height, width) in 0..1.
    """

    threshold = 0.5
    image_processing = staticmethod(unscaled)

    def collate(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the images of a batch as input of the model.

        Args:
            tensors: An image each, of shape (3, height, width).

        Returns:
            A tensor of shape (batch, 3, height, width). For images of different sizes, and for a
            scripted model that takes `List[Tensor]`, a list of tensors.
        """
        if _wants_list(self.model) or any(tensor.shape != tensors[0].shape for tensor in tensors):
            return to_device(list(tensors), self.device)
        return stack_on_device(tensors, self.device)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return the objects in each image.

        Args:
            data: For each image a dict of `boxes` (objects, 4), `labels` (objects) and `scores`
                (objects). A scripted model returns a tuple of its losses and these.

        Returns:
            For each image a list of objects: `{"NAME": [x1, y1, x2, y2], "score": 0.9}`.
        """
        images = data[1] if isinstance(data, tuple) else data
        return [self._detections(image) for image in images]

    def _detections(self, image: Any) -> list[dict[str, Any]]:
        names = self.mapping or {}
        likely = image["scores"] >= self.threshold
        columns = (image[name][likely].tolist() for name in ("boxes", "labels", "scores"))
        return [
            {names.get(str(label), str(label)): box, "score": score}
            for box, label, score in zip(*columns, strict=True)
        ]


def _wants_list(model: Any) -> bool:
    """Tell whether the model is scripted for `List[Tensor]`, like torchvision's detectors."""
    schema = getattr(getattr(model, "forward", None), "schema", None)
    return (
        schema is not None
        and len(schema.arguments) > 1
        and str(schema.arguments[1].type).startswith("List[")
    )
