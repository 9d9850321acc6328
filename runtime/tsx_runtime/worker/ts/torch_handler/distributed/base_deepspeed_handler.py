"""`ts.torch_handler.distributed.base_deepspeed_handler`."""

from tsx_runtime.worker.handlers.deepspeed import BaseDeepSpeedHandler

__all__ = ["BaseDeepSpeedHandler"]
