"""Names of TorchServe's handlers for vLLM and TensorRT-LLM, which archives may import. tsx runs such models without a handler."""

from __future__ import annotations

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import ELSEWHERE
from tsx_runtime.worker.handlers.base import BaseHandler


class VLLMHandler(BaseHandler):
    """Loading one fails with what to do instead."""

    def initialize(self, context: Context) -> None:
        """Raise LoadError."""
        raise LoadError(f"tsx does not include TorchServe's VLLMHandler: {ELSEWHERE['vllm_handler']}")


class TRTLLMHandler(BaseHandler):
    """Loading one fails with what to do instead."""

    def initialize(self, context: Context) -> None:
        """Raise LoadError."""
        raise LoadError(f"tsx does not include TorchServe's TRTLLMHandler: {ELSEWHERE['trt_llm_handler']}")
