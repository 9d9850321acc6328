"""The version of tsx: the distribution, commands, API descriptions and workers read it here."""

from __future__ import annotations

from importlib.util import find_spec

__version__ = "0.1.0"
# The TorchServe release that tsx is compatible with. Scripts and handlers compare with it.
TORCHSERVE_VERSION = "0.12.0"


def is_compiled() -> bool:
    """Tell whether the hot path runs as compiled by `hatch_build.py`, not as pure Python."""
    return find_spec("tsx_runtime.hot_path__mypyc") is not None
