"""Image preprocessing, which must give the tensors of torchvision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.runtime.worker.handlers.steps.image_samples import SIZES, sample
from tsx_runtime.worker.handlers.steps.image_processing import (
    center_crop,
    imagenet,
    resize,
    resized,
    to_rgb,
    to_tensor,
)

# The difference between two levels of a pixel, after normalisation.
STEP = 1 / 255 / 0.224


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_tensor_equals_torchvisions(width: int, height: int) -> None:
    references = np.load(Path(__file__).with_name("image_references.npz"))
    tensor = imagenet(sample(width, height))
    assert tensor.shape == (3, 224, 224)
    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(
        tensor[:, ::16, ::16].numpy(), references[f"pixels-{width}x{height}"], atol=1.01 * STEP
    )
    mean_difference = (
        np.abs(tensor.double().sum(dim=(1, 2)).numpy() - references[f"sums-{width}x{height}"])
        / 224**2
    )
    assert mean_difference.max() < STEP / 4


@given(st.integers(1, 700), st.integers(1, 700))
def test_images_of_any_size_become_224_by_224(width: int, height: int) -> None:
    assert imagenet(sample(width, height)).shape == (3, 224, 224)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_shorter_side_is_256_and_the_other_keeps_the_ratio(width: int, height: int) -> None:
    new_width, new_height = resized(width, height, 256)
    assert min(new_width, new_height) == 256
    assert (
        0 <= max(width, height) / min(width, height) * 256 - max(new_width, new_height) < 1 + 1e-6
    )


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_the_crop_is_the_middle_with_a_black_border(width: int, height: int, size: int) -> None:
    image = Image.fromarray(np.full((height, width), 9, np.uint8))
    cropped = np.asarray(center_crop(image, size))
    assert cropped.shape == (size, size)
    assert (cropped == 9).sum() == min(width, size) * min(height, size)
    assert set(np.unique(cropped)) <= {0, 9}


def test_an_image_of_the_right_size_is_not_resampled() -> None:
    image = sample(256, 300)
    assert resize(image, 256) is image


def test_an_extremely_narrow_image_is_refused() -> None:
    with pytest.raises(ValueError, match="60000 x 1 pixels would be 15360000 x 256"):
        resize(Image.new("RGB", (60_000, 1)), 256)


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"]
)
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = (
        Image.new("LA", (40, 30), (7, 9)).convert("PA")
        if mode == "PA"
        else sample(40, 30).convert("RGB")
    )
    if mode == "LAB":
        image = Image.new("LAB", (40, 30))
    elif mode != "PA":
        image = image.convert(mode)
    assert to_rgb(image).mode == "RGB"
    assert imagenet(image).shape == (3, 224, 224)


def test_the_upper_8_of_16_bits_are_used() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_transparency_is_dropped() -> None:
    assert to_rgb(Image.new("RGBA", (1, 1), (10, 20, 30, 0))).getpixel((0, 0)) == (10, 20, 30)


def test_a_grey_image_is_one_channel_between_0_and_1() -> None:
    tensor = to_tensor(Image.fromarray(np.array([[0, 51, 255]], np.uint8)))
    assert tensor.shape == (1, 1, 3)
    torch.testing.assert_close(tensor[0, 0], torch.tensor([0, 0.2, 1]))
