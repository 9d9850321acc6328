"""Images and sounds: read from what requests hold, and written as base64 for JSON.

Nothing is fetched: a URL is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from tsx_runtime.worker.exceptions import InvalidInput, LoadError
from tsx_runtime.worker.handlers.steps.image_processing import to_rgb
from tsx_runtime.worker.handlers.vision import NotAnImage, open_image

LONGEST = 3600  # seconds of sound in a request: a small file may hold days of silence
MOST_SAMPLES = LONGEST * 48_000  # in a file, of all channels together


def file_bytes(value: Any, what: str) -> bytes:
    """Of a file that is there as bytes, as base64 or as a data URL. Raises InvalidInput."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise InvalidInput(
            f"The input is no {what}: send the bytes of its file, or base64 text in JSON."
        )
    if "://" in value[:12]:
        raise InvalidInput(
            f"The input is a URL, and this server fetches none. Send the {what} itself, as bytes or"
            " base64."
        )
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"The input is no {what}: its text is not base64 ({error}).") from None


class ImageReader:
    """Of the images of one request: all of them together may have no more pixels than Pillow takes
    of one.
    """

    def __init__(self) -> None:
        self._pixels = 0

    def __call__(self, value: Any) -> Image.Image:
        """In RGB. Raises InvalidInput."""
        try:
            image = to_rgb(open_image(file_bytes(value, "image")))
        except (NotAnImage, ValueError, OSError) as error:
            raise InvalidInput(str(error)) from error
        self._pixels += image.width * image.height
        if Image.MAX_IMAGE_PIXELS is not None and self._pixels > (
            most := 2 * Image.MAX_IMAGE_PIXELS
        ):  # above this Pillow raises
            raise InvalidInput(
                f"The images of the request have more than {most} pixels together. Send them in"
                " several requests."
            )
        return image


class SoundReader:
    """Of the sounds of one request: together they last no longer than LONGEST."""

    def __init__(self, rate: int) -> None:
        self._rate = rate  # samples a second
        self._seconds = 0.0

    def __call__(self, value: Any) -> np.ndarray[Any, Any]:
        """Mono, float32.

        Samples may also come as `{"array": [...], "sampling_rate": N}`. Raises InvalidInput.
        """
        if isinstance(value, dict):
            samples, given = value.get("array", value.get("raw")), value.get("sampling_rate")
            try:
                sound = np.asarray(samples, dtype=np.float32)
            except (TypeError, ValueError) as error:
                raise InvalidInput(f"`array` is no list of numbers: {error}") from None
            if sound.ndim != 1 or not isinstance(given, int) or not 1000 <= given <= 400_000:
                raise InvalidInput(
                    'A sound in JSON is {"array": [numbers of one channel], "sampling_rate": a'
                    " number from 1000 to 400000}."
                )
        else:
            sound, given = _decoded(file_bytes(value, "sound"))
        if not len(sound) or not np.isfinite(sound).all():
            raise InvalidInput("The sound is empty, or its samples are no finite numbers.")
        self._seconds += len(sound) / given
        if self._seconds > LONGEST:
            raise InvalidInput(
                f"The request has {self._seconds:.0f} s of sound; at most {LONGEST} s are taken."
                " Send it in parts."
            )
        return sound if given == self._rate else resampled(sound, given, self._rate)


def resampled(sound: np.ndarray[Any, Any], given: int, rate: int) -> np.ndarray[Any, Any]:
    """Band-limited, by its spectrum."""
    count = max(1, round(len(sound) * rate / given))
    spectrum = torch.fft.rfft(torch.from_numpy(np.ascontiguousarray(sound)))
    spectrum = spectrum[: count // 2 + 1]
    result: np.ndarray[Any, Any] = (
        torch.fft.irfft(spectrum, n=count) * (count / len(sound))
    ).numpy()
    return result


def need_soundfile() -> None:
    """Raises LoadError."""
    try:
        import soundfile  # an extra  # noqa: F401  (whether it is there)
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise LoadError(
            f"Sounds are decoded by soundfile, which is missing ({error}): pip install"
            " 'tsx-serve[audio]'"
        ) from error


def _decoded(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    import soundfile  # an extra

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if (
                file.frames * file.channels > MOST_SAMPLES
            ):  # in a small file, where they are silence
                raise InvalidInput(
                    f"The sound has {file.frames} samples in {file.channels} channels; at most"
                    f" {MOST_SAMPLES} are taken."
                )
            return file.read(dtype="float32", always_2d=True).mean(axis=1), int(file.samplerate)
    except (soundfile.SoundFileError, TypeError, ValueError) as error:
        start = data[:8].hex(" ")
        raise InvalidInput(
            f"The input's {len(data)} bytes, beginning {start}, are no sound that can be read:"
            f" {error}"
        ) from None


def plain(value: Any) -> Any:
    """An answer of transformers as JSON can hold it: images as PNG in base64, tensors and arrays as
    lists.
    """
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG", compress_level=1)
        return base64.b64encode(file.getvalue()).decode()
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
