"""`ts.handler_utils.micro_batching`."""

from tsx_runtime.worker.execution.micro_batching import MicroBatching

__all__ = ["MicroBatching"]
