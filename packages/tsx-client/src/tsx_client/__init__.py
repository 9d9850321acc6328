"""A client for models that tsx serves.

Examples:
    >>> with Client("http://127.0.0.1:8080", timeout=5) as client:
    ...     client.models.digits.predict(image=Path("7.png"))
    7
"""

from tsx_client.bodies import FileInput
from tsx_client.client import AsyncClient, Client, Model, Models
from tsx_client.errors import (
    AccessDenied,
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidAnswer,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestFailed,
    ServerError,
    StreamInterrupted,
)
from tsx_client.exchange import Retry
from tsx_client.streams import Event

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "Client",
    "ClientError",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Event",
    "FileInput",
    "InvalidAnswer",
    "InvalidRequest",
    "Model",
    "Models",
    "NotFound",
    "Overloaded",
    "RequestFailed",
    "Retry",
    "ServerError",
    "StreamInterrupted",
]
