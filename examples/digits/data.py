"""scikit-learn's handwritten digits (1,797 scans of 8x8 pixels) in one fixed split."""

from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 0
HELD_OUT = 450


class Split(NamedTuple):
    """Pixels are uint8 of shape (n, 8, 8), as in a PNG; labels are 0..9."""

    train_pixels: np.ndarray
    train_labels: np.ndarray
    test_pixels: np.ndarray
    test_labels: np.ndarray


def load_split() -> Split:
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # the data set counts to 16
    train_pixels, test_pixels, train_labels, test_labels = train_test_split(
        pixels, digits.target, test_size=HELD_OUT, random_state=SEED, stratify=digits.target
    )
    return Split(train_pixels, train_labels, test_pixels, test_labels)
