"""`ts.torch_handler.base_handler`."""

from tsx_runtime.worker.handlers.base import BaseHandler

__all__ = ["BaseHandler"]
