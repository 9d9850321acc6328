"""Objects of S3, or of a compatible service, by boto3 and its credentials.

Everything raises CliError.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tsx_cli.common.failure import CliError

PIECE = 8 << 20  # bytes that are fetched at a time


def is_s3(url: str) -> bool:
    return url.startswith("s3://")


def place(url: str) -> dict[str, str]:
    """The arguments of boto3's calls."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


class S3:
    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    @contextmanager
    def calls(self, url: str) -> Iterator[Any]:
        """A client, whose errors are raised as CliError."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield self._client
        except (BotoCoreError, ClientError, Boto3Error) as error:
            raise CliError(f"{url}: {error}") from error

    def listing(self, url: str) -> Iterator[tuple[str, int, str]]:
        """URL, size and ETag of the object, or, where `url` ends with a slash, of all below it, by
        name.
        """
        with self.calls(url) as client:
            if not url.endswith("/"):
                head = client.head_object(**place(url))
                yield url, int(head["ContentLength"]), head["ETag"]
                return
            bucket, prefix = place(url).values()
            for page in client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix
            ):
                for each in page.get("Contents", ()):
                    if not each["Key"].endswith("/"):  # what consoles make of a folder
                        yield f"s3://{bucket}/{each['Key']}", int(each["Size"]), each["ETag"]

    @cached_property
    def _client(self) -> Any:
        import boto3  # 0.2 s, for objects of S3 alone
        from botocore.config import Config

        config = Config(
            connect_timeout=10,
            read_timeout=60,
            retries={"max_attempts": 10, "mode": "standard"},
            max_pool_connections=32,
        )
        return boto3.client("s3", endpoint_url=self._endpoint, config=config)


class ObjectFile(io.RawIOBase):
    """Reads one version of an object by ranges, so that a broken connection costs one range."""

    def __init__(self, s3: S3, url: str, size: int, tag: str) -> None:
        self._s3, self._url, self._size, self._tag, self._at = s3, url, size, tag, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        last = min(self._at + len(buffer), self._size) - 1
        if last < self._at:
            return 0
        with self._s3.calls(self._url) as client:
            content = client.get_object(
                **place(self._url), Range=f"bytes={self._at}-{last}", IfMatch=self._tag
            )["Body"].read()
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
