"""The upload of recordings to S3, for servers whose disk is lost when they end."""

from __future__ import annotations

import secrets
import socket
from functools import cached_property
from pathlib import Path
from typing import Any


class RecordingUploader:
    """Uploads files to `URL/MODEL/HOST-ID/FILE`; the ID differs for each start of a server."""

    def __init__(self, url: str, endpoint: str | None) -> None:
        self._bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        self._endpoint = endpoint
        # Lambda's environments and replicas on one machine may have the same name.
        self._source = f"{socket.gethostname()}-{secrets.token_hex(4)}"

    def upload(self, file: Path, model: str) -> None:
        """Upload a file; this blocks for at most half a minute if S3 does not answer.

        Raises:
            OSError: S3 refuses the file, or cannot be reached.
        """
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError

        key = f"{self._prefix}{model}/{self._source}/{file.name}"
        try:
            self._client.upload_file(str(file), self._bucket, key)
        except (Boto3Error, BotoCoreError) as error:
            raise OSError(f"s3://{self._bucket}/{key}: {error}") from error

    @cached_property
    def _client(self) -> Any:
        import boto3  # The import takes 0.2 s, so only servers with `record_url` do it.
        from botocore.config import Config

        config = Config(
            connect_timeout=3, read_timeout=10, retries={"max_attempts": 2, "mode": "standard"}
        )
        return boto3.client("s3", endpoint_url=self._endpoint, config=config)
