"""`ts.handler_utils.distributed.deepspeed`."""

from tsx_runtime.worker.handlers.deepspeed import get_ds_engine

__all__ = ["get_ds_engine"]
