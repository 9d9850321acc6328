"""Sends the answers to SQS messages to S3, or to another queue. boto3 is imported on first use."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

AT_ONCE = 16  # calls to AWS


class Result(NamedTuple):
    """The answer to one message."""

    message: str  # its id
    group: str  # of a FIFO queue; else empty
    status: int
    content_type: str
    body: bytes


class ResultSender:
    """Sends answers to S3 or SQS.

    `client` makes boto3's client of a service; `owner` is the account whose buckets alone get
    answers.
    """

    def __init__(self, client: Callable[[str], Any] | None = None, owner: str = "") -> None:
        self._expected = {"ExpectedBucketOwner": owner} if owner else {}
        self._make = cache(client or _client)
        # boto3's clients may be used by many threads, but not made by them.
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(AT_ONCE, "tsx-results")

    async def send(self, place: str, result: Result) -> None:
        """Returns once it is delivered. Raises boto3's errors."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._send, place, result)

    def _client(self, service: str) -> Any:
        with self._making:
            return self._make(service)

    def _send(self, place: str, result: Result) -> None:
        if place.startswith("s3://"):
            bucket, key = s3_key(place, result)
            metadata = {"message-id": result.message, "status": str(result.status)}
            given = {
                "Body": result.body,
                "ContentType": result.content_type,
                "Metadata": metadata,
                **self._expected,
            }
            self._client("s3").put_object(Bucket=bucket, Key=key, **given)
        else:
            self._client("sqs").send_message(QueueUrl=place, **sqs_message(place, result))


def s3_key(place: str, result: Result) -> tuple[str, str]:
    """Bucket and key: the message's id below the prefix, with what its type is called."""
    parts = urlsplit(place)
    prefix = parts.path.strip("/")
    kind = result.content_type.partition(";")[0].strip().lower()
    name = result.message + (mimetypes.guess_extension(kind) or ".bin")
    return parts.netloc, f"{prefix}/{name}" if prefix else name


def sqs_message(queue: str, result: Result) -> Mapping[str, Any]:
    """Text as it is, bytes as base64 with an attribute that says so.

    A FIFO queue keeps the order within the message's group.
    """
    attributes = {
        "tsx-message-id": result.message,
        "tsx-status": str(result.status),
        "content-type": result.content_type,
    }
    try:
        body = result.body.decode()
    except UnicodeDecodeError:
        body, attributes["content-transfer-encoding"] = (
            base64.b64encode(result.body).decode(),
            "base64",
        )
    typed = {
        name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
    }
    order = (
        {"MessageGroupId": result.group or "tsx", "MessageDeduplicationId": result.message}
        if queue.endswith(".fifo")
        else {}
    )
    return {"MessageBody": body or " ", "MessageAttributes": typed, **order}


def _client(service: str) -> Any:
    # here: it takes 0.2 s of a cold start, and only functions with TSX_LAMBDA_RESULTS need it
    import boto3

    return boto3.client(service)
