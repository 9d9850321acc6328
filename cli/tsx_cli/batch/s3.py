"""Access to objects in S3, or in a compatible service, by boto3 with its credentials.

Every function raises CliError.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tsx_cli.common.failure import CliError

RANGE_BYTES = 8 << 20  # size of the range of one request


def is_s3(url: str) -> bool:
    return url.startswith("s3://")


def location(url: str) -> dict[str, str]:
    """Return a URL's bucket and key as arguments of boto3's calls."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


class S3:
    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    @contextmanager
    def calls(self, url: str) -> Iterator[Any]:
        """Yield a client whose errors are raised as CliError."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield self._client
        except (BotoCoreError, ClientError, Boto3Error) as error:
            raise CliError(f"{url}: {error}") from error

    def listing(self, url: str) -> Iterator[tuple[str, int, str]]:
        """Yield the URL, size and ETag of objects.

        A URL with a final slash stands for all objects with this prefix, sorted by name.
        """
        with self.calls(url) as client:
            if not url.endswith("/"):
                head = client.head_object(**location(url))
                yield url, int(head["ContentLength"]), head["ETag"]
                return
            bucket, prefix = location(url).values()
            for page in client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix
            ):
                for entry in page.get("Contents", ()):
                    # The AWS console makes an object with a final slash for a folder.
                    if not entry["Key"].endswith("/"):
                        yield f"s3://{bucket}/{entry['Key']}", int(entry["Size"]), entry["ETag"]

    @cached_property
    def _client(self) -> Any:
        import boto3  # a slow import
        from botocore.config import Config

        config = Config(
            connect_timeout=10,
            read_timeout=60,
            retries={"max_attempts": 10, "mode": "standard"},
            max_pool_connections=32,
        )
        return boto3.client("s3", endpoint_url=self._endpoint, config=config)


class ObjectFile(io.RawIOBase):
    """A file that reads one version of an object.

    It requests ranges, so that a broken connection costs one range only.
    """

    def __init__(self, s3: S3, url: str, size: int, tag: str) -> None:
        self._s3, self._url, self._size, self._etag, self._offset = s3, url, size, tag, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + (0, self._offset, self._size)[whence]
        return self._offset

    def readinto(self, buffer: Any) -> int:
        last = min(self._offset + len(buffer), self._size) - 1
        if last < self._offset:
            return 0
        with self._s3.calls(self._url) as client:
            content = client.get_object(
                **location(self._url), Range=f"bytes={self._offset}-{last}", IfMatch=self._etag
            )["Body"].read()
        buffer[: len(content)] = content
        self._offset += len(content)
        return len(content)
