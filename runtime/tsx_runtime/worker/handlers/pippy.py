"""Names of TorchServe's handlers for PiPPy, which archives may import. PiPPy itself has not run since torch 2.4."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import BaseHandler

_WHY = (
    "This handler needs PiPPy, which was discontinued when it moved into torch and does not run on torch 2.6 and later. "
    "Split the model with torch.distributed.pipelining, or distribute its layers with accelerate's `device_map`, in your own handler."
)


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any) -> NoReturn:
    raise LoadError(_WHY)


def get_pipeline_driver(model: Any, world_size: int, ctx: Any) -> NoReturn:
    raise LoadError(_WHY)


class BasePippyHandler(BaseHandler):
    """Loading one fails with the reason, and with what to do instead."""

    def initialize(self, ctx: Context) -> None:
        initialize_rpc_workers(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), ctx)
