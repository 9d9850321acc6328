"""A module for the fork server, which imports the packages that nearly every worker needs.

It imports torch but does not use CUDA, since a process that has used CUDA cannot be forked.
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
# Otherwise a collection in a worker would write to these objects, and copy pages that workers
# share.
gc.freeze()
