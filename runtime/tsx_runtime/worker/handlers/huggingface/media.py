"""Images and sounds in requests, and images in responses as base64.

A URL is refused, since nothing is fetched.
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

MAX_SOUND_S = 3600  # A small file may hold days of silence.
MAX_SAMPLES = MAX_SOUND_S * 48_000  # the sum of all channels of a file


def file_bytes(value: Any, kind: str) -> bytes:
    """Return the content of a file that was sent as bytes, base64 or a data URL.

    Args:
        value: The file.
        kind: `image` or `sound`, for messages.

    Raises:
        InvalidInput: The value is none of these.
    """
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise InvalidInput(
            f"The input is no {kind}: send the bytes of its file, or base64 text in JSON."
        )
    if "://" in value[:12]:
        raise InvalidInput(
            f"The input is a URL, and this server fetches none. Send the {kind} itself, as bytes or"
            " base64."
        )
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"The input is no {kind}: its text is not base64 ({error}).") from None


class ImageReader:
    """A reader of the images of one request, which bounds the sum of their pixels.

    The bound is the one above which Pillow refuses a single image.
    """

    def __init__(self) -> None:
        self._pixels = 0

    def __call__(self, value: Any) -> Image.Image:
        """Return an image in RGB.

        Raises:
            InvalidInput: The value is no image, or there are too many pixels.
        """
        try:
            image = to_rgb(open_image(file_bytes(value, "image")))
        except (NotAnImage, ValueError, OSError) as error:
            raise InvalidInput(str(error)) from error
        self._pixels += image.width * image.height
        if Image.MAX_IMAGE_PIXELS is not None and self._pixels > (
            most := 2 * Image.MAX_IMAGE_PIXELS
        ):
            raise InvalidInput(
                f"The images of the request have more than {most} pixels together. Send them in"
                " several requests."
            )
        return image


class SoundReader:
    """A reader of the sounds of one request, which together last at most MAX_SOUND_S."""

    def __init__(self, rate: int) -> None:
        """Read sounds with `rate` samples per second."""
        self._rate = rate
        self._seconds = 0.0

    def __call__(self, value: Any) -> np.ndarray[Any, Any]:
        """Return the samples of a sound in mono, as float32 of one dimension.

        The value is a file, or `{"array": [...], "sampling_rate": N}`.

        Raises:
            InvalidInput: The value is no sound, or the sounds are too long.
        """
        if isinstance(value, dict):
            samples, rate = value.get("array", value.get("raw")), value.get("sampling_rate")
            try:
                sound = np.asarray(samples, dtype=np.float32)
            except (TypeError, ValueError) as error:
                raise InvalidInput(f"`array` is no list of numbers: {error}") from None
            if sound.ndim != 1 or not isinstance(rate, int) or not 1000 <= rate <= 400_000:
                raise InvalidInput(
                    'A sound in JSON is {"array": [numbers of one channel], "sampling_rate": a'
                    " number from 1000 to 400000}."
                )
        else:
            sound, rate = _decoded(file_bytes(value, "sound"))
        if not len(sound) or not np.isfinite(sound).all():
            raise InvalidInput("The sound is empty, or its samples are no finite numbers.")
        self._seconds += len(sound) / rate
        if self._seconds > MAX_SOUND_S:
            raise InvalidInput(
                f"The request has {self._seconds:.0f} s of sound; at most {MAX_SOUND_S} s are"
                " taken. Send it in parts."
            )
        return sound if rate == self._rate else resampled(sound, rate, self._rate)


def resampled(sound: np.ndarray[Any, Any], rate: int, new_rate: int) -> np.ndarray[Any, Any]:
    """Resample a sound by its spectrum, without aliasing."""
    count = max(1, round(len(sound) * new_rate / rate))
    spectrum = torch.fft.rfft(torch.from_numpy(np.ascontiguousarray(sound)))
    spectrum = spectrum[: count // 2 + 1]
    result: np.ndarray[Any, Any] = (
        torch.fft.irfft(spectrum, n=count) * (count / len(sound))
    ).numpy()
    return result


def need_soundfile() -> None:
    """Check that soundfile is installed.

    Raises:
        LoadError: It, or its library libsndfile, is missing.
    """
    try:
        import soundfile  # an extra  # noqa: F401  (the import is the check)
    except (ImportError, OSError) as error:  # Without libsndfile it is an OSError.
        raise LoadError(
            f"Sounds are decoded by soundfile, which is missing ({error}): pip install"
            " 'tsx-serve[audio]'"
        ) from error


def _decoded(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    import soundfile  # an extra

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            # A small file may hold this much silence.
            if file.frames * file.channels > MAX_SAMPLES:
                raise InvalidInput(
                    f"The sound has {file.frames} samples in {file.channels} channels; at most"
                    f" {MAX_SAMPLES} are taken."
                )
            return file.read(dtype="float32", always_2d=True).mean(axis=1), int(file.samplerate)
    except (soundfile.SoundFileError, TypeError, ValueError) as error:
        start = data[:8].hex(" ")
        raise InvalidInput(
            f"The input's {len(data)} bytes, beginning {start}, are no sound that can be read:"
            f" {error}"
        ) from None


def plain(value: Any) -> Any:
    """Convert an output of transformers for JSON.

    Images become PNG in base64, and tensors and arrays become lists.
    """
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG", compress_level=1)
        return base64.b64encode(file.getvalue()).decode()
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
