"""`ts.context`."""

from tsx_runtime.worker.handler_api.context import Context, RequestProcessor

__all__ = ["Context", "RequestProcessor"]
