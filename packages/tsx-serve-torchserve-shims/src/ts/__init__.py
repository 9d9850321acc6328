"""TorchServe's package `ts` outside of workers: `ts.launcher`, and the imports of handlers.

Handlers can therefore be tested in any process.
"""

import sys

from tsx_runtime import version
from tsx_runtime.worker.handler_api.ts_shim import ShimFinder

# The finder of files comes first, since `ts.launcher` is a file.
sys.meta_path.append(ShimFinder())

__version__ = version.TORCHSERVE_VERSION
__all__ = ["__version__"]
