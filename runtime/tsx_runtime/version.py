"""The version of tsx, which the distribution, commands, API descriptions and workers read."""

from __future__ import annotations

from importlib.util import find_spec

__version__ = "0.1.0"
# The TorchServe release that tsx is compatible with. Scripts and handlers compare it with theirs.
TORCHSERVE_VERSION = "0.12.0"


def is_compiled() -> bool:
    """Tell whether the hot path was compiled by `hatch_build.py` or is pure Python."""
    return find_spec("tsx_runtime.hot_path__mypyc") is not None
