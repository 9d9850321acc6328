"""A double of Lambda: its Runtime API for the image's entry point, and events of its services."""

from __future__ import annotations

import base64
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers import DEADLINE, clean
from tsx_cli.check.lambda_events import balancer, function_url, messages, rest_api
from tsx_cli.check.lambda_host import ARN, Host, HostedInvocation, RequestTooLarge

__all__ = [
    "Host",
    "HostedInvocation",
    "RequestTooLarge",
    "answer_of",
    "balancer",
    "function_url",
    "messages",
    "rest_api",
]

ENTRY = (sys.executable, "-m", "tsx_runtime.targets.entry", "serve")


def answer_of(answered: Any) -> bytes:
    """Return the body that the service's client receives."""
    body: str = answered["body"]
    return base64.b64decode(body) if answered["isBase64Encoded"] else body.encode()


@contextmanager
def function(
    directory: Path, environment: Mapping[str, str] = {}, **limits: Any
) -> Generator[Host, None, None]:
    """Start the image's entry point with the model in `directory`/model.

    By default, Lambda's time limits do not apply, since a busy machine would exceed them.
    """
    limits = {"init": DEADLINE, "grace": DEADLINE, **limits}
    host = Host(
        ENTRY,
        directory,
        clean(
            {
                "TSX_MODEL_DIR": str(directory / "model"),
                "TSX_CACHE_DIR": str(directory / "cache"),
                **environment,
            }
        ),
        **limits,
    )
    try:
        yield host
    except BaseException:
        sys.stderr.write(host.log)
        raise
    finally:
        host.close()


def bridge(detail: Any, kind: str = "order placed", source: str = "my.shop") -> dict[str, Any]:
    """Return an event of EventBridge.

    https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-events-structure.html
    """
    return {
        "version": "0",
        "id": "fe8d3c65-xmpl-c5c3-2c87-81584709a377",
        "detail-type": kind,
        "source": source,
        "account": "123456789012",
        "time": "2026-04-28T07:20:20Z",
        "region": "eu-central-1",
        "resources": [ARN],
        "detail": detail,
    }


def schedule() -> dict[str, Any]:
    return bridge({}, "Scheduled Event", "aws.events")
