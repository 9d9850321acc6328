"""`ts.context`."""

from tsx_runtime.worker.context import Context, RequestProcessor

__all__ = ["Context", "RequestProcessor"]
