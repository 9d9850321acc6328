"""TorchServe's package `ts` for processes that are not workers.

It contains `ts.launcher` and the imports of handlers, so that a test can run a handler in any
process.
"""

import sys

from tsx_runtime import version
from tsx_runtime.worker.handler_api.ts_shim import ShimFinder

# Python's finder of files precedes this one, because `ts.launcher` is a file.
sys.meta_path.append(ShimFinder())

__version__ = version.TORCHSERVE_VERSION
__all__ = ["__version__"]
