"""Images in, named probabilities out; a request that is no image is told so and harms nobody.

Contract section 5.4.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.runtime.worker.conftest import Request, StartWorker, Worker
from tests.runtime.worker.handlers.steps.image_samples import sample

CLASSES = 7


class Mean(torch.nn.Module):
    """Logits that differ from image to image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=(1, 2, 3))[:, None] * torch.arange(7)  # CLASSES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path: Path = tmp_path_factory.mktemp("classifier") / "mean.pt"
    torch.jit.save(torch.jit.script(Mean()), path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def classifier(start_shared_worker: StartWorker, model: bytes) -> Worker:
    """One worker for all: what one request does to it, the others would see."""
    return start(start_shared_worker, model)


def start(
    start_worker: StartWorker,
    model: bytes,
    source: str | None = None,
    names: Any = None,
    **order: Any,
) -> Worker:
    files: dict[str, str | bytes] = {"mean.pt": model}
    if names is not None:
        files["index_to_name.json"] = json.dumps(names)
    handler = "image_classifier" if source is None else "handler.py"
    worker = start_worker(
        source, files=files, model={"serializedFile": "mean.pt"}, handler=handler, **order
    )
    assert worker.loaded, worker.report
    return worker


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


PHOTO = encoded(sample(300, 200))


def test_the_five_likeliest_classes_come_with_their_probabilities(classifier: Worker) -> None:
    (answer,) = classifier.ask(PHOTO)
    result = json.loads(answer.body)
    assert len(result) == 5
    assert set(result) <= {str(number) for number in range(CLASSES)}
    assert list(result.values()) == sorted(result.values(), reverse=True)
    assert 0 < sum(result.values()) <= 1


def test_the_ways_to_send_an_image_give_the_same_answer(classifier: Worker) -> None:
    text = base64.b64encode(PHOTO)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="data"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
        + PHOTO
        + b"\r\n--x--\r\n"
    )
    requests = [
        Request(PHOTO),
        Request(PHOTO, [(b"Content-Type", b"image/png")]),
        Request(form, [(b"Content-Type", b"multipart/form-data; boundary=x")]),
        Request(text, [(b"Content-Type", b"text/plain")]),
        Request(b"data:image/png;base64," + text, [(b"Content-Type", b"text/plain")]),
        Request(json.dumps(text.decode()).encode(), [(b"Content-Type", b"application/json")]),
    ]
    answers = classifier.ask(*requests)
    assert {answer.status for answer in answers} == {200}
    first, *others = [json.loads(answer.body) for answer in answers]
    for other in others:
        assert other == pytest.approx(first)


def test_images_come_in_kserves_envelopes(
    start_worker: StartWorker, model: bytes, classifier: Worker
) -> None:
    text = base64.b64encode(PHOTO).decode()
    tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text]}
    json_type = [(b"Content-Type", b"application/json")]
    first = start(start_worker, model, envelope="kserve")
    (answer,) = first.ask(
        Request(json.dumps({"instances": [{"data": text}, {"b64": text}]}).encode(), json_type)
    )
    second = start(start_worker, model, envelope="kservev2")
    (tensors,) = second.ask(Request(json.dumps({"inputs": [tensor]}).encode(), json_type))
    expected = pytest.approx(json.loads(classifier.ask(PHOTO)[0].body))
    assert json.loads(answer.body) == {"predictions": [expected] * 2}
    (output,) = json.loads(tensors.body)["outputs"]
    assert (output["name"], output["datatype"], output["data"]) == ("image", "BYTES", [expected])


def test_nested_lists_are_taken_as_they_are(classifier: Worker) -> None:
    pixels = json.dumps([[[0.5] * 4] * 4] * 3).encode()
    (answer,) = classifier.ask(Request(pixels, [(b"Content-Type", b"application/json")]))
    expected = torch.softmax(0.5 * torch.arange(CLASSES), 0).topk(5)
    assert list(json.loads(answer.body).values()) == pytest.approx(expected.values.tolist())


@pytest.mark.parametrize(
    ("mode", "form"),
    [("L", "JPEG"), ("RGBA", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("1", "PNG"), ("I;16", "PNG")],
)
def test_every_mode_of_image_is_answered(classifier: Worker, mode: str, form: str) -> None:
    image = (
        sample(50, 60).convert("I").convert(mode)
        if mode == "I;16"
        else sample(50, 60).convert(mode)
    )
    assert classifier.ask(encoded(image, form))[0].status == 200


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            Request(b"this is no image"),
            "The request's 16 bytes, beginning 74 68 69 73 20 69 73 20, are not a readable image: no known format",
        ),
        (Request(PHOTO[:-200]), "are not a readable image: OSError"),
        (Request(b""), "an empty body, not an image"),
        (Request(b"not base64!", [(b"Content-Type", b"text/plain")]), "is not base64"),
        (Request(b"{}", [(b"Content-Type", b"application/json")]), "holds a dict, not an image"),
        (
            Request(b"[[1, 2], [3]]", [(b"Content-Type", b"application/json")]),
            "not an array of numbers",
        ),
        (
            Request(b"image=1", [(b"Content-Type", b"application/x-www-form-urlencoded")]),
            "a field named 'data'; it has 'image'",
        ),
        (Request(encoded(Image.new("1", (60_000, 1)))), "cannot be prepared: its 60000 x 1 pixels"),
    ],
)
def test_what_is_no_image_is_named_and_its_neighbours_are_answered(
    classifier: Worker, request_: Request, said: str
) -> None:
    before, bad, after = classifier.ask(PHOTO, request_, PHOTO)
    assert before == after
    assert before.status == 200
    assert bad.status == 400
    assert said in bad.message


def bomb(width: int, height: int) -> bytes:
    """A PNG header that claims a size; the pixels are never read."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + head
        + struct.pack(">I", zlib.crc32(head))
        + struct.pack(">I", 0)
        + b"IDAT"
        + b"\0" * 4
    )


def test_gigantic_images_are_refused_unless_the_limit_is_off(
    start_worker: StartWorker, model: bytes, classifier: Worker
) -> None:
    limited = classifier.ask(bomb(20_000, 20_000))[0]
    assert limited.status == 400
    assert "too large" in limited.message
    assert "limit_max_image_pixels=false" in limited.message
    unlimited = start(start_worker, model, limit_max_image_pixels=False).ask(bomb(20_000, 20_000))[
        0
    ]
    assert "too large" not in unlimited.message


def test_classes_have_the_names_of_the_mapping(start_worker: StartWorker, model: bytes) -> None:
    worker = start(
        start_worker,
        model,
        names={str(number): ["id", f"name {number}"] for number in range(CLASSES - 1)},
    )
    assert set(json.loads(worker.ask(PHOTO)[0].body)) <= {
        *(f"name {number}" for number in range(CLASSES - 1)),
        str(CLASSES - 1),
    }


def test_more_classes_can_be_asked_for_than_there_are(
    start_worker: StartWorker, model: bytes
) -> None:
    source = """
        from ts.torch_handler.image_classifier import ImageClassifier
        class All(ImageClassifier):
            def initialize(self, context):
                super().initialize(context)
                self.set_max_result_classes(self.get_max_result_classes() * 20)
    """
    assert len(json.loads(start(start_worker, model, source).ask(PHOTO)[0].body)) == CLASSES


def test_a_subclass_may_bring_its_own_image_processing(
    start_worker: StartWorker, model: bytes
) -> None:
    source = """
        import torch
        from ts.torch_handler.image_classifier import ImageClassifier
        class Own(ImageClassifier):
            def image_processing(self, image):
                assert image.mode == "L", image.mode
                return torch.full((1, 2, 2), image.width / 100)
    """
    (answer,) = start(start_worker, model, source).ask(encoded(sample(100, 50, "L")))
    assert list(json.loads(answer.body).values()) == pytest.approx(
        torch.softmax(1.0 * torch.arange(CLASSES), 0).topk(5).values.tolist()
    )


def test_an_explanation_without_captum_names_the_pip_command(
    start_worker: StartWorker, model: bytes
) -> None:
    source = """
        import sys
        sys.modules["captum"] = None
        from ts.torch_handler.image_classifier import ImageClassifier
        class Explained(ImageClassifier): pass
    """
    (answer,) = start(start_worker, model, source).ask(Request(PHOTO, [(b"explain", b"True")]))
    assert answer.status == 501
    assert "pip install 'tsx-serve[explain]'" in answer.message


def test_an_explanation_is_captums(start_worker: StartWorker, model: bytes) -> None:
    (answer,) = start(start_worker, model, max_response_size=1 << 26).ask(
        Request(PHOTO, [(b"explain", b"True")], b"target=3")
    )
    assert torch.tensor(json.loads(answer.body)).shape == (3, 224, 224)
