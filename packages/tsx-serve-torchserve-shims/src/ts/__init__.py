"""TorchServe's package `ts` outside of workers: `ts.launcher`, and all that a handler may import, so that it can be tested."""

from pathlib import Path

import tsx_runtime
from tsx_runtime import version

# Where `ts` of the workers is: the same modules under the same names. `worker/handler_api/ts_shim.py` has the other way to them.
__path__.append(str(Path(tsx_runtime.__file__).parent / "worker" / "ts"))

__version__ = version.TORCHSERVE_VERSION
__all__ = ["__version__"]
