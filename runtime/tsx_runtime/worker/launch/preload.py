"""Preloads the modules that nearly every worker needs into the fork server; runs nothing.

Torch is imported, CUDA is not touched: a process that has used CUDA cannot be forked.
"""

from __future__ import annotations

import gc

import numpy as np
import torch
from PIL import Image

from tsx_runtime.worker import main
from tsx_runtime.worker.handlers import image_classifier

__all__ = ["Image", "image_classifier", "main", "np", "torch"]

gc.collect()
# a collection in a worker would write to these objects, and so copy the pages that all workers
# share
gc.freeze()
