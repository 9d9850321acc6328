"""The handler image_classifier: probabilities of classes, and refusals of other requests."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import pytest
import torch
from PIL import Image

from tests.runtime.worker.conftest import Request, StartWorker, Worker, a_request
from tests.runtime.worker.handlers.conftest import encoded, script_bytes
from tests.runtime.worker.handlers.steps.image_samples import sample

CLASSES = 7


class Mean(torch.nn.Module):
    """A model whose logits differ from image to image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(1, 2, 3))[:, None] * torch.arange(7)


def start(
    start_worker: StartWorker, source: str | None = None, names: Any = None, **order: Any
) -> Worker:
    files = {"mean.pt": script_bytes(Mean())}
    if names is not None:
        files["index_to_name.json"] = json.dumps(names).encode()
    handler = "image_classifier" if source is None else "handler.py"
    return start_worker(
        source, files=files, model={"serializedFile": "mean.pt"}, handler=handler, **order
    )


@pytest.fixture(scope="module")
def classifier(start_shared_worker: StartWorker) -> Worker:
    return start(start_shared_worker)


PHOTO = encoded(sample(300, 200))


def test_an_image_in_each_format_gets_its_five_most_likely_classes(classifier: Worker) -> None:
    text = base64.b64encode(PHOTO)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="data"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
        + PHOTO
        + b"\r\n--x--\r\n"
    )
    expected, *answers = classifier.values(
        PHOTO,
        a_request(PHOTO, "image/png"),
        a_request(form, "multipart/form-data; boundary=x"),
        a_request(text, "text/plain"),
        a_request(b"data:image/png;base64," + text, "text/plain"),
        a_request(text.decode()),
    )
    assert len(expected) == 5
    assert set(expected) <= {str(number) for number in range(CLASSES)}
    assert list(expected.values()) == sorted(expected.values(), reverse=True)
    assert 0 < sum(expected.values()) <= 1
    for answer in answers:
        assert answer == pytest.approx(expected)


def test_images_may_come_in_kserve_envelopes(start_worker: StartWorker, classifier: Worker) -> None:
    text = base64.b64encode(PHOTO).decode()
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}
    instances = a_request({"instances": [{"data": text}, {"b64": text}]})
    (answer,) = start(start_worker, envelope="kserve").values(instances)
    (tensors,) = start(start_worker, envelope="kservev2").values(a_request({"inputs": [tensor]}))
    expected = pytest.approx(classifier.values(PHOTO)[0])
    assert answer == {"predictions": [expected] * 2}
    (output,) = tensors["outputs"]
    assert (output["name"], output["datatype"], output["data"]) == ("image", "BYTES", [expected])


def test_nested_lists_are_used_without_preprocessing(classifier: Worker) -> None:
    (answer,) = classifier.values(a_request([[[0.5] * 4] * 4] * 3))
    expected = torch.softmax(0.5 * torch.arange(CLASSES), 0).topk(5)
    assert list(answer.values()) == pytest.approx(expected.values.tolist())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (a_request(b"this is no image"), "74 68 69 73 20 69 73 20, are not a readable image"),
        (a_request(PHOTO[:-200]), "are not a readable image: OSError"),
        (
            a_request(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"),
            "EPS is a program",
        ),
        (a_request(b""), "an empty body, not an image"),
        (a_request(b"not base64!", "text/plain"), "is not base64"),
        (a_request({}), "holds a dict, not an image"),
        (a_request([[1, 2], [3]]), "not an array of numbers"),
        (a_request(b"image=1", "application/x-www-form-urlencoded"), "it has 'image'"),
        (a_request(encoded(Image.new("1", (60_000, 1)))), "its 60000 x 1 pixels"),
    ],
)
def test_a_request_without_an_image_fails_alone(
    classifier: Worker, request_: Request, message: str
) -> None:
    first_answer, bad_answer, last_answer = classifier.ask(PHOTO, request_, PHOTO)
    assert first_answer == last_answer
    assert first_answer.status == 200
    assert bad_answer.status == 400
    assert message in bad_answer.message


def bomb(width: int, height: int) -> bytes:
    """Return a PNG file whose header has a given size; its pixels must not be read."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    checksum = struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + head + checksum + b"\0" * 4 + b"IDAT" + b"\0" * 4


def test_huge_images_are_refused_unless_the_limit_is_off(
    start_worker: StartWorker, classifier: Worker
) -> None:
    limited = classifier.ask(bomb(20_000, 20_000))[0]
    assert limited.status == 400
    assert "too large" in limited.message
    assert "limit_max_image_pixels=false" in limited.message
    unlimited = start(start_worker, limit_max_image_pixels=False).ask(bomb(20_000, 20_000))[0]
    assert "too large" not in unlimited.message


def test_classes_have_the_names_of_the_mapping(start_worker: StartWorker) -> None:
    worker = start(
        start_worker,
        names={str(number): ["id", f"name {number}"] for number in range(CLASSES - 1)},
    )
    assert set(worker.values(PHOTO)[0]) <= {
        *(f"name {number}" for number in range(CLASSES - 1)),
        str(CLASSES - 1),
    }


def test_asking_for_too_many_classes_returns_all(start_worker: StartWorker) -> None:
    source = """
        from ts.torch_handler.image_classifier import ImageClassifier
        class All(ImageClassifier):
            def initialize(self, context):
                super().initialize(context)
                self.set_max_result_classes(self.get_max_result_classes() * 20)
    """
    assert len(start(start_worker, source).values(PHOTO)[0]) == CLASSES


def test_a_subclass_may_bring_its_own_image_processing(start_worker: StartWorker) -> None:
    source = """
        import torch
        from ts.torch_handler.image_classifier import ImageClassifier
        class Own(ImageClassifier):
            def image_processing(self, image):
                assert image.mode == "L", image.mode
                return torch.full((1, 2, 2), image.width / 100)
    """
    (answer,) = start(start_worker, source).values(encoded(sample(100, 50, "L")))
    assert list(answer.values()) == pytest.approx(
        torch.softmax(1.0 * torch.arange(CLASSES), 0).topk(5).values.tolist()
    )


def test_an_explanation_without_captum_names_the_pip_command(start_worker: StartWorker) -> None:
    source = """
        import sys
        sys.modules["captum"] = None
        from ts.torch_handler.image_classifier import ImageClassifier
        class Explained(ImageClassifier): pass
    """
    (answer,) = start(start_worker, source).ask(a_request(PHOTO, explain="True"))
    assert answer.status == 501
    assert "pip install 'tsx-serve[explain]'" in answer.message
