"""The times of a handler's steps as metrics, with `handler.profile: true` in model-config.yaml."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def timed(method: F) -> F:
    """Report the milliseconds of a handler's method as `ts_handler_<name>`, if configured."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        context: Any = getattr(self, "context", None)
        config = {} if context is None else context.model_yaml_config.get("handler")
        if not isinstance(config, dict) or config.get("profile") is not True:
            return method(self, *args, **kwargs)
        _wait_for(self)
        start = time.perf_counter()
        result = method(self, *args, **kwargs)
        _wait_for(self)
        context.metrics.add_time(
            f"ts_handler_{method.__name__}", (time.perf_counter() - start) * 1000, None, "ms"
        )
        return result

    return run  # type: ignore[return-value]  # It has the signature of the method.


def _wait_for(handler: Any) -> None:
    """Wait for the GPU, which continues after the call has returned."""
    device = getattr(handler, "device", None)
    if getattr(device, "type", None) == "cuda":
        sys.modules["torch"].cuda.synchronize(device)
