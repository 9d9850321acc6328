"""A module that imports what a `torch.export` program needs besides torch, in the fork server.

It costs one second and 100 MB of shared memory, so only a server with `.pt2` models preloads it.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

from tsx_runtime.worker.launch import preload

__all__ = ["preload"]

for _name in ("torch._dynamo", "torch.export.pt2_archive", "torch.onnx", "networkx"):
    with suppress(ImportError):  # Not every release of torch has, or needs, all of them.
        importlib.import_module(_name)

gc.collect()
gc.freeze()
