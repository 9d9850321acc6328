"""Downloads of objects from S3 or a compatible service, with boto3 and its credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tsx_archiver.storage.private_directory import private_opener
from tsx_runtime.errors import DownloadFailed
from tsx_runtime.sources.urls import CHUNK_BYTES, ModelUrl, Rules


def download(url: ModelUrl, part: Path, rules: Rules, endpoint: str | None) -> None:
    """Download an object; boto3 retries transient failures.

    The operator chose the endpoint, so its address is not checked.

    Raises:
        DownloadFailed: The object cannot be read, is too large, or cannot be written.
    """
    import boto3  # The import takes 0.2 s, so only downloads from S3 do it.
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    rules.check(url)
    try:
        config = Config(
            connect_timeout=10, read_timeout=60, retries={"max_attempts": 5, "mode": "standard"}
        )
        client: Any = boto3.client("s3", endpoint_url=endpoint, config=config)
        try:
            _store(client, url, part, rules)
        except BaseException:
            part.unlink(missing_ok=True)  # Unlike an http transfer, this one cannot be resumed.
            raise
    except (BotoCoreError, ClientError) as error:
        raise DownloadFailed(str(error)) from error
    except OSError as error:
        raise DownloadFailed(
            f"it cannot be written to {part.parent} ({error.strerror or error})"
        ) from error


def _store(client: Any, url: ModelUrl, part: Path, rules: Rules) -> None:
    """Fetch one version of the object in ranges, so that a broken connection repeats one range."""
    bucket, key = url.host, url.path.lstrip("/")
    head = client.head_object(Bucket=bucket, Key=key)
    size, tag = int(head["ContentLength"]), head["ETag"]
    if size > rules.max_bytes:
        raise DownloadFailed(f"it has {size} bytes, but {rules.limit} is {rules.max_bytes}")
    with open(part, "wb", opener=private_opener) as file:
        for start in range(0, size, RANGE_BYTES):
            end = min(start + RANGE_BYTES, size) - 1
            body = client.get_object(
                Bucket=bucket, Key=key, Range=f"bytes={start}-{end}", IfMatch=tag
            )["Body"]
            for chunk in body.iter_chunks(CHUNK_BYTES):
                file.write(chunk)
                if rules.stopped():
                    raise DownloadFailed("the server is stopping")


RANGE_BYTES = 64 << 20
