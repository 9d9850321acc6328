"""`ts.torch_handler.distributed.base_pippy_handler`."""

import os

from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import BaseHandler
from tsx_runtime.worker.ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers

__all__ = ["BasePippyHandler"]


class BasePippyHandler(BaseHandler):
    """For archives that import it: loading one says what became of PiPPy, and what to do."""

    def initialize(self, ctx: Context) -> None:
        initialize_rpc_workers(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), ctx)
