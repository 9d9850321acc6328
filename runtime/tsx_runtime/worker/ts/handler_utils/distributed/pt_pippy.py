"""`ts.handler_utils.distributed.pt_pippy`: names that handlers may import; PiPPy itself has not run since torch 2.4."""

from typing import Any, NoReturn

from tsx_runtime.worker.exceptions import LoadError

__all__ = ["get_pipeline_driver", "initialize_rpc_workers"]

_WHY = (
    "PiPPy, which this handler runs its model by, was given up when its work went into torch, and does not run on torch 2.6 and later. "
    "Cut the model by torch.distributed.pipelining, or spread its layers by accelerate's `device_map`, in a handler of your own."
)


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Any) -> NoReturn:
    raise LoadError(_WHY)


def get_pipeline_driver(model: Any, world_size: int, ctx: Any) -> NoReturn:
    raise LoadError(_WHY)
