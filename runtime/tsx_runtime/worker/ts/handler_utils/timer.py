"""`ts.handler_utils.timer`."""

from tsx_runtime.worker.handlers.steps.timing import timed

__all__ = ["timed"]
