"""Reading of images and sounds in requests, and writing of images in responses as base64.

Chats may name the URLs that the setting `allowed_urls` permits. Other requests may name none.
"""

from __future__ import annotations

import base64
import binascii
import io
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from tsx_archiver.storage.private_directory import temporary_directory
from tsx_runtime.errors import DownloadFailed, TsxError
from tsx_runtime.worker.exceptions import InvalidInput, LoadError
from tsx_runtime.worker.handlers.steps.image_processing import to_rgb
from tsx_runtime.worker.handlers.vision import NotAnImage, open_image

if TYPE_CHECKING:
    from tsx_runtime.sources import ModelUrl

MAX_SOUND_S = 3600  # The limit is needed, since a small file may contain days of silence.
MAX_SAMPLES = MAX_SOUND_S * 48_000  # the limit of samples in all channels of a file
MAX_FETCHED_BYTES, MAX_FETCH_S = 32 << 20, 30.0


def file_bytes(value: Any, kind: str) -> bytes:
    """Return the content of a file that was sent as bytes, base64 or a data URL.

    Args:
        value: The file.
        kind: The noun for the file in messages.

    Raises:
        InvalidInput: The value is neither a file nor base64.
    """
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise InvalidInput(
            f"The input is no {kind}: send the bytes of its file, or base64 text in JSON."
        )
    if "://" in value[:12]:
        raise InvalidInput(
            f"The input is a URL, which only chats of OpenAI's API may have. Send the {kind}"
            " itself, as bytes or base64."
        )
    text = value.partition(",")[2] if value.startswith("data:") else value
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"The input is no {kind}: its text is not base64 ({error}).") from None


class UrlSettings(NamedTuple):
    """The settings of these names, which decide which URLs are fetched."""

    allowed_urls: Sequence[str] = ()
    allow_private_urls: bool = False
    s3_endpoint_url: str | None = None


def fetch(text: str, settings: UrlSettings) -> bytes:
    """Download a file from a URL of a request. Each redirect must be allowed, too.

    Raises:
        InvalidInput: The URL is not allowed, or its file cannot be read.
    """
    # Few requests have URLs, so only these load the modules for downloads.
    from tsx_runtime.sources import AllowList, http_download, parse_url, s3
    from tsx_runtime.sources.urls import Rules

    allow_list, end = AllowList(settings.allowed_urls), time.monotonic() + MAX_FETCH_S

    def check(url: ModelUrl) -> None:
        if url.scheme not in ("http", "https", "s3") or not allow_list.allows(url):
            raise DownloadFailed(
                "the server's setting allowed_urls does not have it; send the file as a data URL"
            )

    rules = Rules(
        check,
        lambda url: settings.allow_private_urls or allow_list.names_host(url),
        MAX_FETCHED_BYTES,
        stopped=lambda: time.monotonic() > end,
        grace_s=MAX_FETCH_S,
        limit="the limit for images and sounds",
    )
    try:
        url = parse_url(text)
        check(url)
        with TemporaryDirectory(prefix="tsx-media-", dir=temporary_directory()) as directory:
            part = Path(directory) / "file"
            if url.scheme == "s3":
                s3.download(url, part, rules, settings.s3_endpoint_url)
            else:
                http_download.download(url, part, rules)
            return part.read_bytes()
    except TsxError as error:
        is_late = time.monotonic() > end
        reason = f"it took more than {MAX_FETCH_S:g} s" if is_late else error.message.rstrip(".")
        raise InvalidInput(f"The URL cannot be read: {reason}.") from error


class ImageReader:
    """A reader of the images of one request, which limits the sum of their pixels.

    The limit is the size above which Pillow refuses a single image.
    """

    def __init__(self) -> None:
        self._pixels = 0

    def __call__(self, value: Any) -> Image.Image:
        """Decode an image, and convert it to RGB.

        Raises:
            InvalidInput: The value is not an image, or the request has too many pixels.
        """
        try:
            image = to_rgb(open_image(file_bytes(value, "image")))
        except (NotAnImage, ValueError, OSError) as error:
            raise InvalidInput(str(error)) from error
        self._pixels += image.width * image.height
        max_pixels = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        if max_pixels and self._pixels > max_pixels:
            raise InvalidInput(
                f"The images of the request have more than {max_pixels} pixels together. Send them"
                " in several requests."
            )
        return image


class SoundReader:
    """A reader of the sounds of one request, which limits their total time to MAX_SOUND_S."""

    def __init__(self, rate: int) -> None:
        """Create a reader that returns `rate` samples per second."""
        self._rate = rate
        self._seconds = 0.0

    def __call__(self, value: Any) -> np.ndarray[Any, Any]:
        """Return the samples of a sound in mono, as float32 of one dimension.

        The value is a file, or `{"array": [...], "sampling_rate": N}`.

        Raises:
            InvalidInput: The value is not a sound, or the sounds are too long.
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
            sound, rate = _decode_sound(file_bytes(value, "sound"))
        if not len(sound) or not np.isfinite(sound).all():
            raise InvalidInput("The sound is empty, or its samples are no finite numbers.")
        self._seconds += len(sound) / rate
        if self._seconds > MAX_SOUND_S:
            raise InvalidInput(
                f"The request has {self._seconds:.0f} s of sound; at most {MAX_SOUND_S} s are"
                " taken. Send it in parts."
            )
        return sound if rate == self._rate else resample(sound, rate, self._rate)


def resample(sound: np.ndarray[Any, Any], rate: int, new_rate: int) -> np.ndarray[Any, Any]:
    """Resample a sound by cutting or extending its spectrum, which avoids aliasing."""
    sample_count = max(1, round(len(sound) * new_rate / rate))
    spectrum = torch.fft.rfft(torch.from_numpy(np.ascontiguousarray(sound)))
    spectrum = spectrum[: sample_count // 2 + 1]
    result: np.ndarray[Any, Any] = (
        torch.fft.irfft(spectrum, n=sample_count) * (sample_count / len(sound))
    ).numpy()
    return result


def check_soundfile() -> None:
    """Check that soundfile is installed.

    Raises:
        LoadError: soundfile or its library libsndfile is missing.
    """
    try:
        import soundfile  # an extra  # noqa: F401  (the import is the check)
    except (ImportError, OSError) as error:  # A missing libsndfile raises OSError.
        raise LoadError(
            f"Sounds are decoded by soundfile, which is missing ({error}): pip install"
            " 'tsx-serve[audio]'"
        ) from error


def _decode_sound(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    import soundfile  # an extra

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            # A small file may contain more samples of silence.
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


def to_json_value(value: Any) -> Any:
    """Convert an output of transformers to values that JSON can represent.

    Images become PNG files in base64; tensors and arrays become lists.
    """
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG", compress_level=1)
        return base64.b64encode(file.getvalue()).decode()
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    return [to_json_value(item) for item in value] if isinstance(value, list | tuple) else value
