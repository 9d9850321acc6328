"""Segments and objects of images. Contract section 5.4."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.runtime.worker.conftest import Request, StartWorker, Worker
from tests.runtime.worker.handlers.steps.image_samples import sample


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def script(module: torch.nn.Module, directory: Path) -> bytes:
    path = directory / "model.pt"
    torch.jit.save(torch.jit.script(module), path)
    return path.read_bytes()


class Bright(torch.nn.Module):
    """Two classes a pixel: dark and bright."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        red = x[:, 0]
        return {"out": torch.stack([-red, red], dim=1)}


class Corners(torch.nn.Module):
    """In each image: one sure thing that fills it, one unsure."""

    def forward(
        self, images: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        found: list[dict[str, torch.Tensor]] = []
        for image in images:
            box = torch.tensor([0.0, 0.0, float(image.shape[2]), float(image.shape[1])])
            score = torch.stack([image.max() * 0 + 0.75, image.min() * 0 + 0.25])
            found.append(
                {"boxes": torch.stack([box, box]), "labels": torch.tensor([1, 2]), "scores": score}
            )
        return {}, found


EAGER_CORNERS = """
import torch

class Corners(torch.nn.Module):
    def forward(self, images):
        kinds = "tensor" if isinstance(images, torch.Tensor) else "list"
        return [{"boxes": torch.tensor([[0.0, 0.0, image.shape[2], image.shape[1]]]), "labels": torch.tensor([1 if kinds == "list" else 2]),
                 "scores": torch.tensor([0.5])} for image in images]
"""


def ask(worker: Worker, *images: Image.Image) -> Any:
    assert worker.loaded, worker.report
    answers = worker.ask(*map(encoded, images))
    assert [answer.status for answer in answers] == [200] * len(images), answers
    return [json.loads(answer.body) for answer in answers]


@pytest.fixture(scope="module")
def segmenter(start_shared_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    files: dict[str, str | bytes] = {
        "model.pt": script(Bright(), tmp_path_factory.mktemp("bright"))
    }
    return start_shared_worker(
        files=files,
        model={"serializedFile": "model.pt"},
        handler="image_segmenter",
        max_response_size=1 << 24,
    )


def test_every_pixel_gets_its_likeliest_class_and_that_classes_probability(
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


def test_what_makes_a_class_likely_is_reported_for_each_pixel(segmenter: Worker) -> None:
    (answer,) = segmenter.ask(
        Request(
            encoded(Image.new("RGB", (300, 300), "white")), [(b"explain", b"True")], b"target=1"
        )
    )
    weights = torch.tensor(json.loads(answer.body))
    assert weights.shape == (3, 224, 224)
    assert weights.sum().item() == pytest.approx(
        (1 - 0.485) / 0.229, rel=1e-3
    )  # all of it from red
    assert weights[1:].abs().max() == 0


def test_things_that_are_sure_enough_are_named_with_their_boxes(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    files: dict[str, str | bytes] = {
        "model.pt": script(Corners(), tmp_path),
        "index_to_name.json": '{"1": "person", "2": "hat"}',
    }
    worker = start_worker(
        files=files, model={"serializedFile": "model.pt"}, handler="object_detector"
    )
    (small,) = ask(worker, sample(30, 20))
    assert small == [{"person": [0.0, 0.0, 30.0, 20.0], "score": pytest.approx(0.75)}]
    several = ask(worker, sample(30, 20), sample(50, 40, "L"))  # of different sizes
    assert several == [small, [{"person": [0.0, 0.0, 50.0, 40.0], "score": pytest.approx(0.75)}]]
    before, bad, after = worker.ask(
        encoded(sample(30, 20)), Request(b"no image"), encoded(sample(30, 20))
    )
    assert (before.status, bad.status, after.status) == (200, 400, 200)


def test_images_of_one_size_come_as_one_tensor_and_the_threshold_may_be_set(
    start_worker: StartWorker,
) -> None:
    source = """
        from ts.torch_handler.object_detector import ObjectDetector
        class Own(ObjectDetector):
            def initialize(self, context):
                super().initialize(context)
                self.threshold = context.model_yaml_config["handler"]["threshold"]
    """
    state = io.BytesIO()
    torch.save({}, state)
    files: dict[str, str | bytes] = {"model.py": EAGER_CORNERS, "weights.pth": state.getvalue()}
    model = {"serializedFile": "weights.pth", "modelFile": "model.py"}
    worker = start_worker(
        source, files=files, model=model, model_config={"handler": {"threshold": 0.5}}
    )
    assert [list(things[0]) for things in ask(worker, sample(30, 20), sample(30, 20))] == [
        ["2", "score"]
    ] * 2
    assert [list(things[0]) for things in ask(worker, sample(30, 20), sample(31, 20))] == [
        ["1", "score"]
    ] * 2
    stricter = start_worker(
        source, files=files, model=model, model_config={"handler": {"threshold": 0.6}}
    )
    assert ask(stricter, sample(30, 20)) == [[]]
