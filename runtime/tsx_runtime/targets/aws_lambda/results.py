"""The sender of answers to SQS messages; it writes to S3 or to another queue.

boto3 is imported at the first use.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

MAX_CALLS = 16  # concurrent calls to AWS
SUFFIXES = {
    "application/json": ".json",
    "text/plain": ".txt",
    "text/html": ".html",
    "image/png": ".png",
    "image/jpeg": ".jpg",
}


class Result(NamedTuple):
    """The answer to one SQS message."""

    message: str  # the id of the message
    group: str  # the message's group in a FIFO queue, or empty
    status: int
    content_type: str
    body: bytes


class ResultSender:
    """A sender of answers, with threads for the calls of boto3."""

    def __init__(self, client: Callable[[str], Any] | None = None, owner: str = "") -> None:
        """Create the threads that send.

        Args:
            client: Returns boto3's client of a service.
            owner: The account that must own the bucket for answers; empty for any account.
        """
        self._owner_options = {"ExpectedBucketOwner": owner} if owner else {}
        self._make_client = cache(client or _client)
        self._lock = threading.Lock()  # Creating a boto3 client is not thread-safe; using it is.
        self._threads = ThreadPoolExecutor(MAX_CALLS, "tsx-results")

    async def send(self, destination: str, result: Result) -> None:
        """Send an answer; errors of boto3 are not caught."""
        await asyncio.get_running_loop().run_in_executor(
            self._threads, self._send, destination, result
        )

    def _client(self, service: str) -> Any:
        with self._lock:
            return self._make_client(service)

    def _send(self, destination: str, result: Result) -> None:
        if destination.startswith("s3://"):
            bucket, key = s3_key(destination, result)
            metadata = {"message-id": result.message, "status": str(result.status)}
            options = {
                "Body": result.body,
                "ContentType": result.content_type,
                "Metadata": metadata,
                **self._owner_options,
            }
            self._client("s3").put_object(Bucket=bucket, Key=key, **options)
        else:
            self._client("sqs").send_message(
                QueueUrl=destination, **sqs_message(destination, result)
            )


def s3_key(destination: str, result: Result) -> tuple[str, str]:
    """Return the bucket and the key, which is PREFIX/MESSAGE_ID and a suffix for the type."""
    parts = urlsplit(destination)
    prefix = parts.path.strip("/")
    name = result.message + SUFFIXES.get(
        result.content_type.partition(";")[0].strip().lower(), ".bin"
    )
    return parts.netloc, f"{prefix}/{name}" if prefix else name


def sqs_message(queue: str, result: Result) -> Mapping[str, Any]:
    """Return the arguments for `send_message`.

    Text is sent unchanged. Other bytes are sent as base64, which an attribute tells. In a FIFO
    queue, the answer has the group of its message, and so keeps its order.
    """
    attributes = {
        "tsx-message-id": result.message,
        "tsx-status": str(result.status),
        "content-type": result.content_type,
    }
    try:
        body = result.body.decode()
    except UnicodeDecodeError:
        body = base64.b64encode(result.body).decode()
        attributes["content-transfer-encoding"] = "base64"
    typed_attributes = {
        name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
    }
    fifo_options = (
        {"MessageGroupId": result.group or "tsx", "MessageDeduplicationId": result.message}
        if queue.endswith(".fifo")
        else {}
    )
    return {"MessageBody": body or " ", "MessageAttributes": typed_attributes, **fifo_options}


def _client(service: str) -> Any:
    # The import is deferred: it takes 0.2 s, and only TSX_LAMBDA_RESULTS needs it.
    import boto3

    return boto3.client(service)
