"""A server of the S3 protocol on this machine: moto, over real HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from moto.moto_api._internal.models import moto_api_backend
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[Any]:
    """Yield a client of a server with one empty bucket; boto3's credentials are set meanwhile.

    The server's address is `client.meta.endpoint_url`.
    """
    moto_api_backend.reset()  # All servers of a process have the same buckets.
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        for name, value in (
            ("ACCESS_KEY_ID", "a"),
            ("SECRET_ACCESS_KEY", "b"),
            ("DEFAULT_REGION", "us-east-1"),
        ):
            patch.setenv(f"AWS_{name}", value)
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        client: Any = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket=BUCKET)
        try:
            yield client
        finally:
            server.stop()
