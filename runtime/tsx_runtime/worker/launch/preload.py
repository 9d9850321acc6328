"""A module that imports into the fork server what nearly every worker needs; it runs nothing.

It imports torch but leaves CUDA alone: a process that has used CUDA cannot be forked.
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
# A collection in a worker would write to these objects, and so copy pages that workers share.
gc.freeze()
