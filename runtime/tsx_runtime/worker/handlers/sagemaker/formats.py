"""The formats of the default `input_fn` and `output_fn` of SageMaker's PyTorch toolkit.

They are JSON, CSV, npy, npz and JSON lines.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import torch

from tsx_runtime.errors import BadRequest
from tsx_runtime.shared.content_types import best_type
from tsx_runtime.worker.codecs.requests import media_type_of
from tsx_runtime.worker.exceptions import PredictionException, describe_error

JSON, CSV, NPY, NPZ, LINES = (
    "application/json",
    "text/csv",
    "application/x-npy",
    "application/x-npz",
    "application/jsonlines",
)
READABLE_TYPES = (JSON, CSV, NPY, NPZ, LINES)
WRITABLE_TYPES = (JSON, CSV, NPY, LINES)
# An `input_fn` gets bodies of these types as str, and others as bytes.
TEXT_TYPES = (JSON, CSV, LINES)
UNSUPPORTED = 415


def to_tensor(body: str | bytes, content_type: str) -> torch.Tensor:
    """Return the numbers of a body as float32 for text formats, or else in their own dtype.

    Raises:
        PredictionException: The content type is not supported.
        BadRequest: The body is not of this type.
    """
    kind = media_type_of(content_type)
    if kind not in READABLE_TYPES:
        advice = f"input_fn in your program, or send one of {', '.join(READABLE_TYPES)}"
        raise PredictionException(
            f"Content type {content_type!r} is not supported by the default input_fn: define"
            f" {advice}.",
            UNSUPPORTED,
        )
    try:
        array = _read(body, kind)
        return (
            torch.as_tensor(array, dtype=torch.float32)
            if kind in TEXT_TYPES
            else torch.from_numpy(array)
        )
    except (ValueError, TypeError, EOFError, OSError, RuntimeError, RecursionError) as error:
        raise BadRequest(
            f"The body is not {kind} with numbers: {describe_error(error)}."
        ) from error


def _read(body: str | bytes, kind: str) -> Any:
    if kind == JSON:
        return np.array(json.loads(body))
    if kind == LINES:
        text = body if isinstance(body, str) else body.decode()
        return np.array([json.loads(line) for line in text.splitlines() if line.strip()])
    if kind == CSV:
        text = body if isinstance(body, str) else body.decode()
        return _checked(np.genfromtxt(io.StringIO(text), delimiter=",", dtype=np.float64))
    data = body if isinstance(body, bytes) else body.encode()
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    if len(loaded.files) != 1:
        raise ValueError(f"it holds the arrays {', '.join(loaded.files)}; it must hold one")
    return loaded[loaded.files[0]]


def _checked(array: Any) -> Any:
    if not array.size or np.isnan(array).all():
        raise ValueError("it has no numbers in it")
    return array


def to_body(prediction: Any, header: str, default: str) -> tuple[str | bytes, str]:
    """Return the body, and its type: the supported type that the client prefers.

    Raises:
        PredictionException: The client accepts no supported type.
    """
    kind = best_type(header, sorted(WRITABLE_TYPES, key=lambda written: written != default))
    if kind is None:
        advice = f"output_fn in your program, or accept one of {', '.join(WRITABLE_TYPES)}"
        raise PredictionException(
            f"{header!r} is not written by the default output_fn: define {advice}.", UNSUPPORTED
        )
    if isinstance(prediction, torch.Tensor):
        prediction = prediction.detach().cpu()
        prediction = (
            prediction.float().numpy() if prediction.dtype is torch.bfloat16 else prediction.numpy()
        )
    if kind == JSON:
        return (
            json.dumps(
                prediction.tolist() if isinstance(prediction, np.ndarray) else prediction,
                default=_plain,
            ),
            kind,
        )
    if kind == LINES:
        rows = prediction.tolist() if isinstance(prediction, np.ndarray) else prediction
        return (
            "".join(
                json.dumps(row, default=_plain) + "\n"
                for row in (rows if isinstance(rows, list) else [rows])
            ),
            kind,
        )
    array = np.asarray(prediction)
    file: Any = io.StringIO() if kind == CSV else io.BytesIO()
    if kind == CSV:
        np.savetxt(file, np.atleast_1d(array), delimiter=",", fmt="%s")
    else:
        np.save(file, array, allow_pickle=False)
    body: str | bytes = file.getvalue()
    return body, kind


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
