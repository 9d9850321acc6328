"""Preloads the modules that loading a `torch.export` program imports besides torch: one second, and
100 MB of shared memory.

For the preload list of a server that has `.pt2` models; others would wait for it without need.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

from tsx_runtime.worker.launch import preload

__all__ = ["preload"]

for _name in ("torch._dynamo", "torch.export.pt2_archive", "torch.onnx", "networkx"):
    with suppress(ImportError):  # not every release of torch has, or needs, each of them
        importlib.import_module(_name)

gc.collect()
gc.freeze()
