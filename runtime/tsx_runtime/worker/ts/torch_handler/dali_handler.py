"""`ts.torch_handler.dali_handler`."""

from tsx_runtime.worker.handlers.dali import DALIHandler

__all__ = ["DALIHandler"]
