"""The format of SageMaker's data capture: JSON lines, each with a request and its answer.

https://docs.aws.amazon.com/sagemaker/latest/dg/model-monitor-data-capture.html

SageMaker Model Monitor reads these files. `eventId` is the id of the request, unless the client has
chosen an `inferenceId`. The version of the model is in `customAttributes`, as `tsx-version=1.0`.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, BinaryIO

from tsx_runtime.recordings import Headers, NotARecording, Recorded

CAPTURE_SUFFIX = ".jsonl"
_VERSION = "tsx-version="


def read_capture(
    source: BinaryIO, label: str, model: str = "", version: str = ""
) -> Iterator[Recorded]:
    """Yield the requests of an open file in its order, which is about that of their answers.

    Args:
        source: The file.
        label: Its name in errors.
        model: The name of the endpoint.
        version: The name of the endpoint's variant, for lines without a version.

    Raises:
        NotARecording: A line is not in this format.
        OSError: The file cannot be read.
    """
    for number, line in enumerate(source, 1):
        if line.isspace():
            continue
        try:
            entry = _decode(line)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise NotARecording(
                f"{label}, line {number}, is not in the format of SageMaker's data capture:"
                f" {error!r}. Remove the line"
            ) from error
        yield entry._replace(model=model, version=entry.version or version)


def encode_capture(entry: Recorded) -> bytes:
    """Return the line of a request."""
    capture_data = {"endpointInput": _encode_part("INPUT", entry.headers, entry.body)}
    if entry.answer is not None:
        answer_part = _encode_part("OUTPUT", entry.answer_headers, entry.answer)
        capture_data["endpointOutput"] = answer_part
    at = datetime.fromtimestamp(round(entry.at, 3), timezone.utc)
    metadata: dict[str, Any] = {
        "eventId": entry.request_id or str(uuid.uuid4()),
        "inferenceTime": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    if entry.version:
        metadata["customAttributes"] = [_VERSION + entry.version]
    document = {"captureData": capture_data, "eventMetadata": metadata, "eventVersion": "0"}
    return json.dumps(document).encode() + b"\n"


def _decode(line: bytes) -> Recorded:
    document = json.loads(line)
    capture_data, metadata = document["captureData"], document["eventMetadata"]
    request_headers, body = _decode_part(capture_data.get("endpointInput"))
    answer_headers, answer = _decode_part(capture_data.get("endpointOutput"))
    texts = metadata.get("customAttributes") or []
    versions = [text.removeprefix(_VERSION) for text in texts if text.startswith(_VERSION)]
    return Recorded(
        # Python 3.10 does not read Z.
        datetime.fromisoformat(metadata["inferenceTime"].replace("Z", "+00:00")).timestamp(),
        versions[0] if versions else "",
        "",
        request_headers,
        body or b"",
        0 if answer is None else 200,  # Failed answers are not captured.
        answer_headers=answer_headers,
        answer=answer,
        request_id=str(metadata.get("inferenceId") or metadata["eventId"]),
    )


def _decode_part(part: Any) -> tuple[Headers, bytes | None]:
    if part is None:
        return (), None
    text, encoding = part["data"], part["encoding"]
    if encoding == "BASE64":
        body = base64.b64decode(text, validate=True)
    elif encoding in ("CSV", "JSON"):
        body = text.encode()
    else:
        raise ValueError(f"unknown encoding {encoding!r}")
    content_type = part.get("observedContentType")
    return ((("content-type", str(content_type)),) if content_type else ()), body


def _encode_part(mode: str, headers: Headers, body: bytes) -> dict[str, str]:
    lower_headers = {name.lower(): value for name, value in headers}
    content_type = lower_headers.get("content-type", "application/octet-stream")
    kind = content_type.partition(";")[0].strip().lower()
    try:
        text, encoding = body.decode(), {"text/csv": "CSV", "application/json": "JSON"}[kind]
    except (KeyError, UnicodeDecodeError):
        text, encoding = base64.b64encode(body).decode(), "BASE64"
    return {"observedContentType": content_type, "mode": mode, "data": text, "encoding": encoding}
