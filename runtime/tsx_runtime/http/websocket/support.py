"""Whether the installed packages have what one is made of."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Mapping
from functools import cache
from types import ModuleType
from typing import Any

WEBSOCKETS = "uvicorn.protocols.websockets.websockets_sansio_impl"
WEBSOCKETS_NEED = {
    "WebSocketsSansIOProtocol": (
        # attributes
        "conn",
        "frames",
        "handshake_complete",
        "handshake_initiated",
        "loop",
        "read_paused",
        "transport",
        # what this server calls, or does otherwise
        "connection_made",
        "data_received",
        "connection_lost",
        "handle_close",
        "handle_parser_exception",
        "keepalive_timeout",
        "pause_writing",
        "receive",
        "resume_writing",
        "run_asgi",
        "schedule_ping",
        "send",
        "shutdown",
    ),
}

logger = logging.getLogger("tsx.http")


@cache
def websocket_connection() -> Any:
    """The class of WebSocket connections; None, with one warning, where the installed packages do not have what it is made of."""
    try:
        module = importlib.import_module(WEBSOCKETS)
        missing = missing_of(module, WEBSOCKETS_NEED)
    except ImportError as error:
        missing = [f"{WEBSOCKETS} ({error})"]
    if missing:
        logger.warning("no WebSocket is answered: this version of uvicorn, or of websockets, lacks %s; upgrade both", ", ".join(missing))
        return None
    from tsx_runtime.http.websocket.connection import WebSocketConnection  # here, because it takes 20 ms, and most servers need none

    return WebSocketConnection


def missing_of(module: ModuleType, needed: Mapping[str, Collection[str]]) -> list[str]:
    """What a module does not have of the names that are needed: classes, and parts of each."""
    missing = []
    for name, parts in needed.items():
        kind = getattr(module, name, None)
        if kind is None:
            missing.append(name)
        else:
            there = parts_of(kind)
            missing += [f"{name}.{part}" for part in parts if part not in there]
    return missing


def parts_of(kind: type) -> set[str]:
    """The names of a class, and those that its constructor gives an instance."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return {*dir(kind), *(name for made in constructors if hasattr(made, "__code__") for name in made.__code__.co_names)}
