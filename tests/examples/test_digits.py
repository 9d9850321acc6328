"""The committed digits model reaches the accuracy of metrics.json in each of its forms."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tsx_archiver import ArchiveSpec, write_archive
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.settings.schema import Settings
from tsx_runtime.wire import request_meta

pytestmark = pytest.mark.slow


DIGITS = Path(__file__).parents[2] / "examples" / "digits"
METRICS = json.loads((DIGITS / "metrics.json").read_text(encoding="utf-8"))


def load(name: str) -> ModuleType:
    """Load a module of the example without adding its name to `sys.modules`."""
    spec = importlib.util.spec_from_file_location(f"examples_digits_{name}", DIGITS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def eager(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    model: torch.nn.Module = load("model").DigitNet()
    model.load_state_dict(weights)
    return model


VARIANTS: dict[str, Callable[[Path], torch.nn.Module]] = {
    "digits.pth": lambda path: eager(torch.load(path, weights_only=True)),
    "digits.safetensors": lambda path: eager(load_file(path)),
    "digits.pt": lambda path: torch.jit.load(path),
    "digits.pt2": lambda path: torch.export.load(path).module(),
}


@pytest.fixture(scope="module")
def held_out() -> tuple[torch.Tensor, np.ndarray]:
    split = load("data").load_split()
    return torch.from_numpy(split.test_pixels.astype(np.float32) / 255).unsqueeze(
        1
    ), split.test_labels


@pytest.mark.parametrize("file", VARIANTS)
def test_each_variant_reaches_the_stored_accuracy(
    file: str, held_out: tuple[torch.Tensor, np.ndarray]
) -> None:
    images, labels = held_out
    with torch.inference_mode():
        guesses = VARIANTS[file](DIGITS / file)(images).argmax(1).numpy()
    accuracy = float((guesses == labels).mean())
    assert len(labels) == METRICS["held_out"]
    assert accuracy >= 0.98
    # One image may differ, since sums can be computed in another order.
    assert accuracy == pytest.approx(METRICS["accuracy"], abs=1.5 / len(labels))


@pytest.mark.parametrize("file", VARIANTS)
def test_each_variant_gives_equal_results_for_one_image_and_many(
    file: str, held_out: tuple[torch.Tensor, np.ndarray]
) -> None:
    images = held_out[0][:17]
    model = VARIANTS[file](DIGITS / file)
    with torch.inference_mode():
        singly = torch.cat([model(image.unsqueeze(0)) for image in images])
        torch.testing.assert_close(model(images), singly)


@pytest.mark.parametrize("file", VARIANTS)
def test_weights_are_small_and_contain_no_paths(file: str) -> None:
    content = (DIGITS / file).read_bytes()
    assert len(content) == METRICS["bytes"][file]
    assert len(content) < 300_000
    assert b"site-packages" not in content
    assert str(DIGITS).encode() not in content


def test_sample_images_are_held_out_images_of_their_digit(
    held_out: tuple[torch.Tensor, np.ndarray],
) -> None:
    images, labels = held_out
    for digit in range(10):
        with Image.open(DIGITS / "images" / f"{digit}.png") as picture:
            pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)
        equal = (images[:, 0] == pixels).all(dim=2).all(dim=1).numpy()
        assert labels[equal].tolist() == [digit]


def test_class_names_are_in_the_order_of_the_digits() -> None:
    names = json.loads((DIGITS / "index_to_name.json").read_text(encoding="utf-8"))
    assert list(names) == [str(digit) for digit in range(10)]
    assert [names["0"], names["7"], names["9"]] == ["zero", "seven", "nine"]


async def served_guesses(archive: Path, pictures: list[bytes], cache: Path) -> list[str]:
    """Return one worker's most likely class for each image."""
    settings = Settings(cache_dir=cache, job_queue_size=len(pictures))
    async with open_model(archive, settings) as version:
        meta = request_meta("test", b"", [(b"Content-Type", b"image/png")])
        jobs = [WaitingJob(meta, picture, time.monotonic()) for picture in pictures]
        for job in jobs:
            version.submit(job)
        answers = [json.loads((await job.done).body) for job in jobs]
    return [max(answer, key=answer.__getitem__) for answer in answers]


@pytest.mark.parametrize("file", VARIANTS)
def test_each_served_variant_reaches_the_stored_accuracy(file: str, tmp_path: Path) -> None:
    split = load("data").load_split()
    pictures = []
    for pixels in split.test_pixels:
        picture = io.BytesIO()
        Image.fromarray(pixels).save(picture, "PNG")
        pictures.append(picture.getvalue())
    spec = ArchiveSpec(
        "digits",
        str(DIGITS / "handler.py"),
        serialized_file=DIGITS / file,
        model_file=DIGITS / "model.py" if file.endswith((".pth", ".safetensors")) else None,
        extra_files=[DIGITS / "index_to_name.json"],
        config_file=DIGITS / "model-config.yaml",
    )
    archive = write_archive(spec, tmp_path)
    names = list(json.loads((DIGITS / "index_to_name.json").read_text(encoding="utf-8")).values())
    guesses = asyncio.run(served_guesses(archive, pictures, tmp_path / "cache"))
    accuracy = float(
        np.mean(
            [guess == names[label] for guess, label in zip(guesses, split.test_labels, strict=True)]
        )
    )
    assert accuracy == pytest.approx(METRICS["accuracy"], abs=1.5 / len(pictures))
