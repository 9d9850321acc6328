"""TorchServe's package `ts` as workers see it: the same names, tsx's code behind them. See `ts_shim.py`."""

from tsx_runtime.worker.ts.version import __version__

__all__ = ["__version__"]
