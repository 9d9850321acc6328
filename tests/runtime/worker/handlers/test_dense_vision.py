"""The handlers image_segmenter and object_detector."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image

from tests.runtime.worker.conftest import StartWorker, Worker, a_request
from tests.runtime.worker.handlers.conftest import encoded, script_bytes, torch_bytes
from tests.runtime.worker.handlers.steps.image_samples import sample


class Bright(torch.nn.Module):
    """A model with two classes per pixel: dark and bright."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        red = x[:, 0]
        return {"out": torch.stack([-red, red], dim=1)}


class Corners(torch.nn.Module):
    """A model that finds two objects in each image, with scores of 0.75 and 0.25."""

    def forward(
        self, images: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        objects: list[dict[str, torch.Tensor]] = []
        for image in images:
            box = torch.tensor([0.0, 0.0, float(image.shape[2]), float(image.shape[1])])
            score = torch.stack([image.max() * 0 + 0.75, image.min() * 0 + 0.25])
            objects.append(
                {"boxes": torch.stack([box, box]), "labels": torch.tensor([1, 2]), "scores": score}
            )
        return {}, objects


EAGER_CORNERS = """
import torch

class Corners(torch.nn.Module):
    def forward(self, images):
        kinds = "tensor" if isinstance(images, torch.Tensor) else "list"
        return [{"boxes": torch.tensor([[0.0, 0.0, image.shape[2], image.shape[1]]]), "labels": torch.tensor([1 if kinds == "list" else 2]),
                 "scores": torch.tensor([0.5])} for image in images]
"""


def ask(worker: Worker, *images: Image.Image) -> list[Any]:
    return worker.values(*map(encoded, images))


@pytest.fixture(scope="module")
def segmenter(start_shared_worker: StartWorker) -> Worker:
    return start_shared_worker(
        files={"model.pt": script_bytes(Bright())},
        model={"serializedFile": "model.pt"},
        handler="image_segmenter",
        max_response_size=1 << 24,
    )


def test_every_pixel_gets_its_most_likely_class_and_probability(
    segmenter: Worker,
) -> None:
    dark, bright = ask(segmenter, Image.new("RGB", (300, 300)), Image.new("L", (224, 300), 255))
    for answer, kind, red in ((dark, 0, -0.485 / 0.229), (bright, 1, (1 - 0.485) / 0.229)):
        pixels = torch.tensor(answer)
        assert pixels.shape == (224, 224, 2)
        assert (pixels[:, :, 0] == kind).all()
        assert pixels[:, :, 1].mean().item() == pytest.approx(
            torch.sigmoid(torch.tensor(2 * abs(red))).item()
        )


def test_an_explanation_has_a_weight_for_each_pixel(segmenter: Worker) -> None:
    image = encoded(Image.new("RGB", (300, 300), "white"))
    (answer,) = segmenter.values(a_request(image, query=b"target=1", explain="True"))
    weights = torch.tensor(answer)
    assert weights.shape == (3, 224, 224)
    # Only the red channel affects the result.
    assert weights.sum().item() == pytest.approx((1 - 0.485) / 0.229, rel=1e-3)
    assert weights[1:].abs().max() == 0


def test_objects_above_the_threshold_are_named_with_their_boxes(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        files={
            "model.pt": script_bytes(Corners()),
            "index_to_name.json": '{"1": "person", "2": "hat"}',
        },
        model={"serializedFile": "model.pt"},
        handler="object_detector",
    )
    (small,) = ask(worker, sample(30, 20))
    assert small == [{"person": [0.0, 0.0, 30.0, 20.0], "score": pytest.approx(0.75)}]
    answers = ask(worker, sample(30, 20), sample(50, 40, "L"))
    assert answers == [small, [{"person": [0.0, 0.0, 50.0, 40.0], "score": pytest.approx(0.75)}]]
    first_answer, bad_answer, last_answer = worker.ask(
        encoded(sample(30, 20)), b"no image", encoded(sample(30, 20))
    )
    assert (first_answer.status, bad_answer.status, last_answer.status) == (200, 400, 200)


def test_images_of_one_size_become_one_tensor_and_the_threshold_is_configurable(
    start_worker: StartWorker,
) -> None:
    source = """
        from ts.torch_handler.object_detector import ObjectDetector
        class Own(ObjectDetector):
            def initialize(self, context):
                super().initialize(context)
                self.threshold = context.model_yaml_config["handler"]["threshold"]
    """
    start = partial(
        start_worker,
        source,
        files={"model.py": EAGER_CORNERS, "weights.pth": torch_bytes({})},
        model={"serializedFile": "weights.pth", "modelFile": "model.py"},
    )
    worker = start(model_config={"handler": {"threshold": 0.5}})
    for width, name in ((30, "2"), (31, "1")):
        answers = ask(worker, sample(30, 20), sample(width, 20))
        assert [list(objects[0]) for objects in answers] == [[name, "score"]] * 2
    stricter = start(model_config={"handler": {"threshold": 0.6}})
    assert ask(stricter, sample(30, 20)) == [[]]
