"""What the fast lane uses of uvicorn: the names, a check of the installed version, and the
fallback.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

MODULE = "uvicorn.protocols.http.httptools_impl"
ARGUMENTS = ("config", "server_state", "app_state", "_loop")  # of a protocol
RELIED_ON = {
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
        # what the event loop, the parser and uvicorn's server call
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
# What HttpToolsProtocol must have for header names to be kept as they were sent
NAMES_NEED = (
    "on_message_begin",
    "on_header",
    "headers",
    "scope",
)

logger = logging.getLogger("tsx.http")


def http_protocol() -> Any:
    """Return what uvicorn's `http` gets: the fast lane, or, with one warning, uvicorn's own
    protocol, which gives the same answers by way of FastAPI.

    Where uvicorn's own does not even tell header names as they were sent, handlers see them in
    lower case.
    """
    if sys.platform == "win32":
        return "auto"
    module: ModuleType | None = None
    try:
        module = importlib.import_module(MODULE)
        missing = missing_parts(module)
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
    # here, because with another uvicorn it may not even be imported
    from tsx_runtime.http.fast_lane.connection import FastLane

    return FastLane


def _cased_protocol(module: ModuleType | None) -> Any:
    there = parts_of(getattr(module, "HttpToolsProtocol", object))
    if not there.issuperset(NAMES_NEED):
        return "auto"
    from tsx_runtime.http.fast_lane.cased_protocol import CasedProtocol  # here, as above

    return CasedProtocol


def missing_parts(module: ModuleType) -> list[str]:
    """What uvicorn's module does not have of that which the fast lane relies on."""
    missing = []
    for name, parts in RELIED_ON.items():
        kind = getattr(module, name, None)
        if kind is None:
            missing.append(name)
        else:
            there = parts_of(kind)
            missing += [f"{name}.{part}" for part in parts if part not in there]
    protocol = getattr(module, "HttpToolsProtocol", None)
    if protocol is not None and tuple(inspect.signature(protocol).parameters) != ARGUMENTS:
        missing.append(f"HttpToolsProtocol({', '.join(ARGUMENTS)})")
    return missing


def parts_of(kind: type) -> set[str]:
    """The names of a class, and those that its constructor gives an instance."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return {
        *dir(kind),
        *(
            name
            for made in constructors
            if hasattr(made, "__code__")
            for name in made.__code__.co_names
        ),
    }
