"""The check that the installed uvicorn supports the fast lane, and the fallback."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

MODULE = "uvicorn.protocols.http.httptools_impl"
PROTOCOL_PARAMETERS = (
    "config",
    "server_state",
    "app_state",
    "_loop",
)  # parameters of HttpToolsProtocol
REQUIRED_MEMBERS = {
    "HttpToolsProtocol": (
        # attributes
        "app_state",
        "client",
        "config",
        "connections",
        "cycle",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "scheme",
        "scope",
        "server_state",
        "transport",
        # methods that the event loop, the parser and uvicorn's server call
        "connection_made",
        "data_received",
        "connection_lost",
        "pause_writing",
        "resume_writing",
        "on_message_begin",
        "on_url",
        "on_header",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "send_400_response",
        "shutdown",
        "_unset_keepalive_if_required",
    ),
    "RequestResponseCycle": ("keep_alive", "response_complete", "response_started", "transport"),
    "FlowControl": ("pause_reading", "read_paused", "resume_reading", "write_paused"),
}
# members of HttpToolsProtocol that CasedProtocol uses
CASED_PROTOCOL_MEMBERS = ("on_message_begin", "on_header", "headers", "scope")

logger = logging.getLogger("tsx.http")


def http_protocol() -> Any:
    """Return uvicorn's option `http`: the fast lane, or a fallback after one warning.

    The fallback is `CasedProtocol`, which responds alike through FastAPI. If uvicorn does not
    support this either, its own protocol is used, and handlers see header names in lower case.
    """
    if sys.platform == "win32":
        return "auto"
    module: ModuleType | None = None
    try:
        module = importlib.import_module(MODULE)
        missing = missing_members(module)
    except ImportError as error:
        missing = [f"{MODULE} ({error})"]
    if missing:
        logger.warning(
            "the fast lane does not support this version of uvicorn (it lacks %s): predictions"
            " work, but several times slower, and slow or large headers are not refused; `pip"
            " install --upgrade tsx-serve`, or an older uvicorn, restores the fast lane",
            ", ".join(missing),
        )
        return _cased_protocol(module)
    # The import is deferred, because it fails with an unsupported uvicorn.
    from tsx_runtime.http.fast_lane.connection import FastLane

    return FastLane


def _cased_protocol(module: ModuleType | None) -> Any:
    members = members_of(getattr(module, "HttpToolsProtocol", object))
    if not members.issuperset(CASED_PROTOCOL_MEMBERS):
        return "auto"
    # The import is deferred, because it may fail with an unsupported uvicorn.
    from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol

    return CasedProtocol


def missing_members(module: ModuleType) -> list[str]:
    """Return the names that the fast lane uses but uvicorn's module does not have."""
    missing = []
    for name, parts in REQUIRED_MEMBERS.items():
        kind = getattr(module, name, None)
        if kind is None:
            missing.append(name)
        else:
            members = members_of(kind)
            missing += [f"{name}.{part}" for part in parts if part not in members]
    protocol = getattr(module, "HttpToolsProtocol", None)
    if (
        protocol is not None
        and tuple(inspect.signature(protocol).parameters) != PROTOCOL_PARAMETERS
    ):
        missing.append(f"HttpToolsProtocol({', '.join(PROTOCOL_PARAMETERS)})")
    return missing


def members_of(kind: type) -> set[str]:
    """Return the names of a class's members, and all names in its constructors."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return {
        *dir(kind),
        *(
            name
            for constructor in constructors
            if hasattr(constructor, "__code__")
            for name in constructor.__code__.co_names
        ),
    }
