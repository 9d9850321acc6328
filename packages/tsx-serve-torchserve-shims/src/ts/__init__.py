"""TorchServe's package `ts` outside of workers: `ts.launcher`, and all that a handler may import,
so that it can be tested.
"""

import sys

from tsx_runtime import version
from tsx_runtime.worker.handler_api.ts_shim import ShimFinder

sys.meta_path.append(ShimFinder())  # behind the finder of files, which finds `ts.launcher`

__version__ = version.TORCHSERVE_VERSION
__all__ = ["__version__"]
