"""`ts.handler_utils.timer`."""

from tsx_runtime.worker.handlers.timing import timed

__all__ = ["timed"]
