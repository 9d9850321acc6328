"""A module for the fork server, which imports what a `torch.export` program needs besides torch.

The import takes a second and 100 MB of shared memory, so only a server with `.pt2` models uses it.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

from tsx_runtime.worker.launch import preload

__all__ = ["preload"]

for _name in ("torch._dynamo", "torch.export.pt2_archive", "torch.onnx", "networkx"):
    # Some releases of torch do not have all of them, and do not need them.
    with suppress(ImportError):
        importlib.import_module(_name)

gc.collect()
gc.freeze()
